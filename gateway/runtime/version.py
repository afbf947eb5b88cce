"""Which release this is."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Final

DISTRIBUTION: Final = "opificia-sandbox-host"


def version() -> str:
    """Return the version that is installed, `unknown` where the code runs without having been installed."""
    try:
        return installed(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"
