"""A PostgreSQL server of the test: its own data folder and socket, run as an unprivileged user."""

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final, Self

from tests.support.processes import wait_until

_VERSIONS: Final = Path("/usr/lib/postgresql")


class Postgres:
    """Use as a context manager. `url` is how control.toml names a database of it.

    `durable`: a commit waits for the disk, as in production; tests do without.
    """

    def __init__(self, *, durable: bool = False) -> None:
        found = sorted(_VERSIONS.glob("*/bin"), key=lambda path: int(path.parent.name))
        if not found:
            raise RuntimeError("PostgreSQL is not installed: run scripts/setup")
        self._bin = found[-1]
        self._fsync = "on" if durable else "off"
        self.root = Path(tempfile.mkdtemp(prefix="opificia-pg-"))
        # The server refuses to run as root; Debian's package brings an account for it.
        self._user: list[str] = []
        if os.geteuid() == 0:
            account = pwd.getpwnam("postgres")
            os.chown(self.root, account.pw_uid, account.pw_gid)
            self._user = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups", "--"]
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def program(self) -> Path:
        """The server's program."""
        return self._bin / "postgres"

    @property
    def pid(self) -> int:
        """The running server's first process."""
        assert self._server is not None
        return self._server.pid

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://opificia@/{database}?host={self.root}"

    def create(self, database: str, *options: str) -> str:
        """Make an empty database with these options of createdb(1) and return its url."""
        self._run("createdb", "-h", str(self.root), "-U", "opificia", *options, database)
        return self.url(database)

    def start(self) -> None:
        options = [
            "-c",
            f"fsync={self._fsync}",
            "-c",
            "listen_addresses=",
            "-c",
            f"unix_socket_directories={self.root}",
        ]
        self._server = subprocess.Popen(
            [*self._user, str(self.program), "-D", str(self.root / "data"), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
        wait_until(self._answers, "PostgreSQL")

    def stop(self) -> None:
        """End it at once, as a crash does."""
        if self._server is not None:
            # SIGQUIT: immediate shutdown (postgres(1)).
            self._server.send_signal(3)
            self._server.wait(30)
            self._server = None

    def _answers(self) -> bool:
        return self._run("pg_isready", "-q", "-h", str(self.root), check=False) == 0

    def _run(self, command: str, *arguments: str, check: bool = True) -> int:
        argv = [*self._user, str(self._bin / command), *arguments]
        return subprocess.run(argv, check=check, stdout=subprocess.DEVNULL, cwd="/").returncode

    def __enter__(self) -> Self:
        self._run("initdb", "-D", str(self.root / "data"), "-U", "opificia", "--auth=trust", "--no-sync")
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.root, ignore_errors=True)
