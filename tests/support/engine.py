"""A private Docker engine in network and mount namespaces of its own: nothing of the machine's is touched.

A *holder* process owns the namespaces, and takes everything down when we are killed; the engine is started into them with nsenter. (`ip netns exec` would
remount /sys and hide the cgroups from the engine.) All bridges and firewall rules live in the holder's
network namespace, all mounts in its mount namespace, so both vanish with the last process in it, however it
died. In the mount namespace

- /run/containerd is hidden: the machine's own containerd and its shims keep their sockets there;
- resolv.conf names a loopback resolver, which is what makes Docker's embedded DNS forward from the host's
  side (CVE-2024-29018): a sandbox that resolves nothing here resolves nothing anywhere.

Images stay in the engine's data folder for the next run; containers, networks and volumes do not. Several
engines can run side by side: each takes a numbered slot, held by a lock that dies with its process. What is
left in a slot all the same is found by name (command lines, cgroup, loop devices) and removed when the slot is next taken.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

import docker
import requests.exceptions

from tests.support import identities
from tests.support.paths import ENGINES
from tests.support.processes import (
    ConditionTimeoutError,
    all_pids,
    cgroups,
    command_line,
    kill_all,
    spawn,
    stop,
    wait_until,
)

_RUNTIME: Final = Path("/run/opificia-engines")
_SLOTS: Final = 16
# Stopping containers that ignore SIGTERM takes the engine up to 15 s.
_STOP_GRACE_S: Final = 30.0

# $1: runtime folder, $2: name of the cgroup.
_HOLD: Final = """
set -u
mkdir -p /run/containerd &&
    mount -t tmpfs -o mode=0711 tmpfs /run/containerd &&
    mount --bind "$1/resolv.conf" /etc/resolv.conf &&
    ip link set lo up &&
    echo ready > "$1/held" || exit 1
# The end of input means that whoever started us is gone without having stopped us: it was killed.
cat > /dev/null
for daemon in dockerd containerd; do
    pid=$(cat "$1/$daemon.pid") && kill "$pid" || continue
    timeout 20 tail --pid="$pid" -f /dev/null || kill -9 "$pid"
done
find /sys/fs/cgroup -path "*/$2/*" -name cgroup.procs -exec cat {} + | sort -u | xargs -r kill -9
"""


class EngineUnavailableError(RuntimeError):
    """No private engine can run here; the message says what to do about it."""


class PrivateEngine:
    """One slot's engine. Use as a context manager, or call `start` and `stop`."""

    def __init__(self, slot: int, lock: IO[bytes], *, live_restore: bool = False) -> None:
        self.slot = slot
        self._live_restore = live_restore
        self._lock = lock
        self._runtime = _RUNTIME / str(slot)
        self._data = ENGINES / str(slot)
        self._cgroup = f"opificia-engine-{slot}"
        self._holder: subprocess.Popen[bytes] | None = None
        self._containerd: subprocess.Popen[bytes] | None = None
        self._daemon: subprocess.Popen[bytes] | None = None
        self._containerd_socket = self._runtime / "containerd.sock"
        # For whoever uses the engine: emptied whenever the slot is taken or given back.
        self.scratch: Final = self._data / "scratch"
        self.socket: Final = self._runtime / "docker.sock"
        self.log: Final = self._runtime / "dockerd.log"

    @classmethod
    def acquire(cls, *, live_restore: bool = False) -> Self:
        """Take the first free slot; nothing is started yet. Raises EngineUnavailableError.

        `live_restore`: containers outlive the engine's restarts, as a site may have set it.
        """
        if os.geteuid() != 0:
            raise EngineUnavailableError("a private engine needs root: run as root")
        for command in ("dockerd", "containerd", "ip", "nsenter", "iptables", "ebtables"):
            if shutil.which(command) is None:
                raise EngineUnavailableError(f"{command} is not installed: run scripts/setup")
        ENGINES.mkdir(parents=True, exist_ok=True)
        _RUNTIME.mkdir(exist_ok=True)
        for slot in range(_SLOTS):
            lock = (_RUNTIME / f"{slot}.lock").open("wb")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            return cls(slot, lock, live_restore=live_restore)
        raise EngineUnavailableError(f"all {_SLOTS} engine slots under {_RUNTIME} are in use")

    @property
    def url(self) -> str:
        """The engine's address as docker clients take it."""
        return f"unix://{self.socket}"

    def in_network(self, argv: Sequence[str]) -> list[str]:
        """Return `argv` wrapped so that it runs in the engine's network namespace:

        on "the host" of this engine.
        """
        assert self._holder is not None, "the engine is not started"
        return ["nsenter", f"--target={self._holder.pid}", "--net", "--", *argv]

    def client(self) -> docker.DockerClient:
        """Open a client; the caller closes it."""
        return docker.DockerClient(base_url=self.url, timeout=60)

    def start(self) -> None:
        """Start namespaces and engine, free of what an earlier run left. Raises EngineUnavailableError."""
        self._clear_leftovers()
        try:
            self._start_all()
        except EngineUnavailableError:
            # The kept data may be what is broken (a full disk, a power cut): once more from nothing.
            self._end_all()
            shutil.rmtree(self._data, ignore_errors=True)
            self._start_all()

    def stop(self) -> None:
        """Remove containers, networks and volumes, then stop everything and give the slot back."""
        try:
            if self._daemon is not None and self._daemon.poll() is None:
                self._empty()
        finally:
            self._end_all()
            self._lock.close()

    def restart(self, *, kill: bool = False) -> None:
        """Restart the engine in the same namespaces, as `systemctl restart docker` does (`kill`:

        as after a crash).
        """
        assert self._daemon is not None, "the engine is not started"
        if kill:
            self._daemon.kill()
        stop(self._daemon, grace_s=_STOP_GRACE_S)
        self.start_daemon()

    def start_daemon(self) -> None:
        """Start the engine into the namespaces that stand, and wait until it answers."""
        self._daemon = self._spawn_inside("dockerd", f"--config-file={self._runtime}/daemon.json")
        self._await("private engine", self._answers)

    def stop_daemon(self, *, kill: bool = False) -> None:
        """Stop only the engine, as when it is away; namespaces and their rules stay."""
        assert self._daemon is not None, "the engine is not started"
        if kill:
            self._daemon.kill()
        stop(self._daemon, grace_s=_STOP_GRACE_S)

    def freeze_daemon(self) -> None:
        """Let the engine do nothing more until it is killed (`stop_daemon`), as when it hangs; containers go on."""
        assert self._daemon is not None, "the engine is not started"
        self._daemon.send_signal(signal.SIGSTOP)

    def processes(self) -> list[int]:
        """Return all processes of this engine and its containers, also those that an earlier run left."""
        return [pid for pid in all_pids() if self._is_ours(pid)]

    def log_tail(self, lines: int = 20) -> str:
        """Return the end of the engine's log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _start_all(self) -> None:
        self._runtime.mkdir(parents=True)
        self.scratch.mkdir(parents=True)
        # Users of the socket's group must be able to reach it, whatever the umask was.
        for folder in (_RUNTIME, self._runtime, ENGINES, self._data, self.scratch):
            folder.chmod(0o755)
        self._configure()
        with self.log.open("ab") as log:
            self._holder = spawn(
                [
                    *("unshare", "--net", "--mount", "--propagation=slave", "--"),
                    *("sh", "-c", _HOLD, "opificia-engine-holder", str(self._runtime), self._cgroup),
                ],
                log=log,
                stdin=subprocess.PIPE,
            )
        self._await("namespaces of the private engine", (self._runtime / "held").exists)
        self._containerd = self._spawn_inside("containerd", f"--config={self._runtime}/containerd.toml")
        (self._runtime / "containerd.pid").write_text(f"{self._containerd.pid}\n")
        self._await("private containerd", self._containerd_socket.is_socket)
        self.start_daemon()
        self._empty()

    def _configure(self) -> None:
        (self._runtime / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        engine = {
            "bridge": "none",
            "cgroup-parent": f"/{self._cgroup}",
            "containerd": str(self._containerd_socket),
            "data-root": str(self._data / "docker"),
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
            "exec-root": str(self._runtime / "exec"),
            "group": str(identities.ENGINE_GROUP),
            "hosts": [self.url],
            "live-restore": self._live_restore,
            "log-level": "warn",
            "pidfile": str(self._runtime / "dockerd.pid"),
            "userland-proxy": False,
        }
        (self._runtime / "daemon.json").write_text(json.dumps(engine))
        (self._runtime / "containerd.toml").write_text(
            f"""version = 2
root = "{self._data}/containerd"
state = "{self._runtime}/containerd"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "{self._containerd_socket}"
[debug]
level = "error"
"""
        )

    def _spawn_inside(self, *argv: str) -> subprocess.Popen[bytes]:
        assert self._holder is not None, "the namespaces are not there"
        with self.log.open("ab") as log:
            inside = ["nsenter", f"--target={self._holder.pid}", "--net", "--mount", "--"]
            return spawn([*inside, *argv], log=log)

    def _await(self, what: str, ready: Callable[[], bool]) -> None:
        try:
            wait_until(ready, what, timeout_s=60, give_up=self._death)
        except ConditionTimeoutError as error:
            raise EngineUnavailableError(f"{error}\n{self.log_tail()}") from error

    def _answers(self) -> bool:
        # docker-py leaves the socket of a refused connection open, which tests take for an error.
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(self.socket)) != 0:
                return False
        try:
            with contextlib.closing(self.client()) as client:
                return bool(client.ping())
        except (docker.errors.DockerException, requests.exceptions.RequestException):
            return False

    def _death(self) -> str | None:
        for name, process in (
            ("holder", self._holder),
            ("containerd", self._containerd),
            ("dockerd", self._daemon),
        ):
            if process is not None and process.poll() is not None:
                return f"{name} ended with status {process.returncode}"
        return None

    def _empty(self) -> None:
        with contextlib.closing(self.client()) as client:
            for container in client.containers.list(all=True, ignore_removed=True):
                with contextlib.suppress(docker.errors.NotFound):
                    container.remove(force=True, v=True)
            for network in client.networks.list(filters={"type": "custom"}):
                # As with volumes below: an endpoint too many, after a restart with live-restore.
                with contextlib.suppress(docker.errors.APIError):
                    network.remove()
            _detach_loop_devices(self._data / "docker" / "volumes")
            for volume in client.volumes.list():
                # After a restart with live-restore the engine counts a mount too many of a volume, and gives it
                # up only at its next start.
                with contextlib.suppress(docker.errors.APIError):
                    volume.remove(force=True)

    def _end_all(self) -> None:
        for process in (self._daemon, self._containerd):
            if process is not None:
                stop(process, grace_s=_STOP_GRACE_S)
        if self._holder is not None:
            self._holder.kill()
            self._holder.communicate()
        self._daemon = self._containerd = self._holder = None
        self._clear_leftovers()

    def _clear_leftovers(self) -> None:
        kill_all(self.processes())
        _detach_loop_devices(self._data / "docker" / "volumes")
        for hierarchy in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*/")):
            _remove_cgroup(hierarchy / self._cgroup)
        for folder in (self._runtime, self.scratch):
            shutil.rmtree(folder, ignore_errors=True)

    def _is_ours(self, pid: int) -> bool:
        # The folder's name ends in a slash or the argument's end, so that slot 1 is not taken for slot 10.
        words = command_line(pid).replace("=", " ").replace("unix://", "").split()
        names_folder = any(word == str(self._runtime) or word.startswith(f"{self._runtime}/") for word in words)
        return names_folder or f"/{self._cgroup}/" in cgroups(pid)


def _detach_loop_devices(volumes: Path) -> None:
    """Detach the loop devices of images in the engine's volumes, else their disk space is never given back.

    They are found by file: the path that the kernel knows is that of the container which attached them.
    """
    for image in volumes.glob("*/_data/*.ext4"):
        (Path("/dev/opificia") / image.stem).unlink(missing_ok=True)
        found = subprocess.run(
            ["losetup", "--noheadings", "--output", "NAME", "--associated", str(image)],
            check=True,
            capture_output=True,
            text=True,
        )
        for device in found.stdout.split():
            subprocess.run(["losetup", "--detach", device], check=False)


def _remove_cgroup(path: Path) -> None:
    for child in sorted(path.glob("**/"), reverse=True):
        with contextlib.suppress(OSError):
            child.rmdir()
