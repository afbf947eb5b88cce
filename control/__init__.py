"""The control daemon: sessions, Docker, database, runner protocol, API and CLI.

Of `gateway` it may know only the contract and the runtime helpers.
"""

from typing import Final

VERSION: Final = "0.1.0"
