"""The clients that the tests run, and what each of them shows its user when it is refused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.clients.corp import PACKAGE, REPOSITORY, VERSION

# pip takes a refusal for a fault of the network and tries again, for seven seconds by default; it says why only when it
# does. Both package managers look for newer versions of themselves.
QUICKLY: Final = {
    "PIP_RETRIES": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "npm_config_prefer_online": "true",
    "npm_config_update_notifier": "false",
}


@dataclass(frozen=True, slots=True)
class Client:
    """One way to fetch something of the corp server at `host`. `finds` is in its output when it has it.

    `tells_reason`: its user sees the refusal's reason; otherwise only the status. `installed`: it is one of what the
    fixture `sdks` installs.
    """

    name: str
    argv: Callable[[str], tuple[str, ...]]
    finds: str
    port: int = 443
    tells_reason: bool = True
    installed: bool = False

    def __str__(self) -> str:
        return self.name


def _getting(name: str, *program: str, scheme: str = "https", **facts: bool) -> Client:
    port = {"http": 80, "https": 443}[scheme]
    return Client(name, lambda host: (*program, f"{scheme}://{host}/hello"), f'"hello": "{scheme}"', port, **facts)


CURL: Final = ("curl", "-sS", "--fail-with-body")
FETCH: Final = ("node", "/in/get_fetch.mjs")
REQUESTS: Final = ("env", "PYTHONPATH=/in/python", "python3", "/in/get_requests.py")
URLLIB: Final = ("python3", "/in/get_urllib.py")

CLIENTS: Final = (
    # curl and git show nothing of the reply to a CONNECT but its status.
    _getting("curl", *CURL, tells_reason=False),
    _getting("curl-http", *CURL, scheme="http"),
    Client(
        "git",
        lambda host: ("git", "ls-remote", f"https://{host}/git/{REPOSITORY}"),
        "refs/heads/main",
        tells_reason=False,
    ),
    _getting("fetch", *FETCH),
    _getting("fetch-http", *FETCH, scheme="http"),
    _getting("requests", *REQUESTS, installed=True),
    _getting("requests-http", *REQUESTS, scheme="http", installed=True),
    _getting("urllib", *URLLIB),
    _getting("urllib-http", *URLLIB, scheme="http"),
    Client(
        "pip",
        lambda host: (
            "pip",
            "download",
            "--no-deps",
            "--dest",
            "/work",
            f"--index-url=https://{host}/simple/",
            PACKAGE,
        ),
        "Successfully downloaded",
    ),
    Client("npm", lambda host: ("npm", "view", f"--registry=https://{host}/npm/", PACKAGE, "version"), VERSION),
    Client(
        "apt",
        lambda host: ("/in/apt.sh", f"-oDir::Etc::SourceList=/in/{host}.list", "update"),
        "Get:",
        port=80,
    ),
)
