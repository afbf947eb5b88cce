"""Other proxies, each set to its best for this work: no cache, no log, one process, splice where it can."""

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Final

from bench.load import Route, build
from bench.machine import version_of
from bench.peers.base import Ground, Peer
from bench.processes import FIRST_UID, Process, accepts, free_port

# HAProxy wants two descriptors a connection and a pipe and refuses to start when they are not there; 20,000 is a usual limit.
MAX_CONNECTIONS: Final = 9000
_SPLICING: Final = f"""\
global
  maxconn {MAX_CONNECTIONS}
  maxpipes 500
  nbthread 1
  tune.pipesize 1048576
defaults
  mode tcp
  timeout connect 15s
  timeout client 300s
  timeout server 300s
  option splice-request
  option splice-response
"""


class ProgramPeer(Peer):
    """A proxy that is an installed program."""

    program = ""
    version: tuple[str, ...] = ("-v",)

    def __init__(self) -> None:
        super().__init__()
        self._port = 0

    @classmethod
    def missing(cls) -> str:
        return "" if shutil.which(cls.program) else f"{cls.program} is not installed"

    def about(self) -> str:
        return version_of(self.program, *self.version)

    def _run(self, argv: list[str], directory: Path, *ports: int) -> None:
        if os.geteuid() == 0:
            os.chown(directory, self.uid, self.uid)
        process = Process(argv, log=directory / "log", uid=self.uid, cwd=directory)
        self._processes.append(process)
        process.wait_for(lambda: all(accepts(port) for port in ports), self.name)

    def route(self, *, tls: bool = False) -> Route:
        assert self._ground is not None
        return Route(f"127.0.0.1:{self._port}", self._ground.tls if tls else self._ground.plain)


class Splicer(ProgramPeer):
    """The C program of `load/splicer.c`: the practical limit of a CONNECT proxy in one thread."""

    name = "c-splicer"
    uid = FIRST_UID + 1

    @classmethod
    def missing(cls) -> str:
        return "" if build("splicer") else "there is no C compiler"

    def about(self) -> str:
        return "epoll + splice(2) in C, this repository"

    def _start(self, ground: Ground, directory: Path) -> None:
        built = build("splicer")
        assert built is not None
        # The cache is in a home that the peer's user cannot enter.
        program = shutil.copy(built, directory / "splicer")
        self._port = free_port()
        self._run([str(program), str(self._port)], directory, self._port)


class HAProxy(ProgramPeer):
    """TCP mode, tuned to splice. No forward proxy (it cannot CONNECT): the reference of how fast bytes can be moved."""

    name = "haproxy-tcp"
    program = "haproxy"
    uid = FIRST_UID + 2

    def __init__(self) -> None:
        super().__init__()
        self._tls_port = 0

    def _start(self, ground: Ground, directory: Path) -> None:
        self._port, self._tls_port = free_port(), free_port()
        lines = [_SPLICING]
        for port, target in ((self._port, ground.plain), (self._tls_port, ground.tls)):
            if target:
                lines += [f"listen p{port}", f"  bind 127.0.0.1:{port}", f"  server s {target}"]
        config = directory / "haproxy.cfg"
        config.write_text("\n".join(lines) + "\n")
        self._run([self.program, "-db", "-f", str(config)], directory, self._port)

    def route(self, *, tls: bool = False) -> Route:
        return Route(f"127.0.0.1:{self._tls_port if tls else self._port}")


class Squid(ProgramPeer):
    """One worker, no cache, no log, everything allowed."""

    name = "squid"
    program = "squid"
    is_forward_proxy = True
    uid = FIRST_UID + 3

    def _start(self, ground: Ground, directory: Path) -> None:
        self._port = free_port()
        config = directory / "squid.conf"
        config.write_text(
            f"http_port 127.0.0.1:{self._port}\n"
            "http_access allow all\n"
            "cache deny all\n"
            "cache_mem 8 MB\n"
            "access_log none\n"
            f"cache_log {directory}/cache.log\n"
            "cache_store_log none\n"
            # Otherwise it keeps counts of each client.
            "client_db off\n"
            f"pid_filename {directory}/squid.pid\n"
            f"coredump_dir {directory}\n"
            "pinger_enable off\n"
            "visible_hostname bench\n"
            "max_filedescriptors 20000\n"
            "shutdown_lifetime 1 second\n"
        )
        # A name of its own: its shared memory is named by that, and another Squid on the machine has "squid". What is
        # wrong it says on stderr as well.
        name = re.sub("[^a-z0-9]", "", directory.name)
        self._run([self.program, "-N", "-d", "1", "-n", name, "-f", str(config)], directory, self._port)


class Tinyproxy(ProgramPeer):
    """A thread a connection."""

    name = "tinyproxy"
    program = "tinyproxy"
    is_forward_proxy = True
    uid = FIRST_UID + 4

    def _start(self, ground: Ground, directory: Path) -> None:
        self._port = free_port()
        config = directory / "tinyproxy.conf"
        config.write_text(
            f"Port {self._port}\nListen 127.0.0.1\nTimeout 600\nMaxClients {MAX_CONNECTIONS}\nLogLevel Critical\n"
        )
        self._run([self.program, "-d", "-c", str(config)], directory, self._port)


class CommandPeer(ProgramPeer):
    """Any other CONNECT proxy, given as a command with `{port}` in it; it must need no credentials."""

    name = "command"
    is_forward_proxy = True
    uid = FIRST_UID + 5

    def __init__(self, name: str, command: str) -> None:
        super().__init__()
        self.name = name  # type: ignore[misc]  # one class, many peers
        self._command = command

    def about(self) -> str:
        return self._command

    def _start(self, ground: Ground, directory: Path) -> None:
        self._port = free_port()
        self._run(shlex.split(self._command.replace("{port}", str(self._port))), directory, self._port)
