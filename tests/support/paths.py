"""Where things lie that outlive a run: the cache made by scripts/setup, and this checkout."""

import os
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).resolve().parents[2]
# Readable by every user: daemons under test run from its Python as unprivileged uids.
CACHE: Final = Path(os.environ.get("OPIFICIA_CACHE", "/var/cache/opificia"))
IMAGES: Final = CACHE / "images"
ENGINES: Final = CACHE / "engines"
