"""A stand-in for a bare-metal server: systemd as its first process, its own Docker Engine, PostgreSQL, sshd and firewall.

It is a container on the tests' private engine, in a network of which nothing leads out: what is deployed to it comes from
the controller or not at all. Its image is made once and kept by the hash of what it is made from.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.support.engine import PrivateEngine
from tests.support.paths import CACHE
from tests.support.processes import wait_until

# Everything that the play would otherwise fetch; the play itself finds it there and installs nothing.
_PACKAGES: Final = (
    "ca-certificates",
    "curl",
    "dbus",
    "docker.io",
    "e2fsprogs",
    "ebtables",
    "iproute2",
    "iptables",
    "kmod",
    "nftables",
    "openssh-server",
    "postgresql",
    "procps",
    "python3",
    "sudo",
    "systemd",
    "systemd-sysv",
)
_BUILD: Final = (
    "mmdebstrap",
    "--mode=root",
    "--format=tar",
    "--variant=minbase",
    "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
    '--aptopt=APT::Install-Recommends "false"',
    f"--include={','.join(_PACKAGES)}",
    *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "info", "locale", "man")),
    "bookworm",
)
# Kernel settings that are the machine's own and not the container's are hidden: what the play sets of them goes to a file.
_BOOT: Final = """
set -e
mount --make-rshared /
for m in /sys/fs/cgroup $(awk '$5 ~ "^/sys/fs/cgroup/" {print $5}' /proc/self/mountinfo); do
    mount -o remount,bind,rw $m
done
for name in fs kernel vm; do
    mount --bind /proc/sys/$name /proc/sys/$name
    mount -o remount,bind,ro /proc/sys/$name
done
mkdir -p /run/machine
cat /proc/sys/fs/pipe-user-pages-soft > /run/machine/pipe-user-pages-soft
mount --bind /run/machine/pipe-user-pages-soft /proc/sys/fs/pipe-user-pages-soft
[ -e /dev/loop-control ] || mknod /dev/loop-control c 10 237
# The numbers are the whole machine's, on which other tests may use a good many.
for n in $(seq 0 255); do [ -e /dev/loop$n ] || mknod /dev/loop$n b 7 $n; done
exec /sbin/init
"""
# Found by file: the path that the kernel knows is that of the container which attached them.
_DETACH: Final = """
systemctl stop docker.socket docker
for file in /var/lib/docker/volumes/opificia-volumes-*/_data/*.ext4; do
    losetup --noheadings --output NAME --associated "$file" | xargs --no-run-if-empty --max-args=1 losetup --detach
done
"""
_NETWORK: Final = "opificia-machines"
_SUBNET: Final = "10.232.0.0/24"


class MachineError(AssertionError):
    """A command on the machine failed; the message holds what it said."""


def image() -> Path:
    """Return the machine's root file system, built if it is not in the cache (about a minute)."""
    digest = hashlib.sha256("\0".join(_BUILD).encode()).hexdigest()[:16]
    done = CACHE / "machine" / f"machine-{digest}.tar"
    if not done.exists():
        done.parent.mkdir(parents=True, exist_ok=True)
        partial = done.with_suffix(f".{os.getpid()}")
        subprocess.run([*_BUILD, str(partial)], check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        partial.rename(done)
    return done


class Machine:
    """One stand-in, reached by ssh like any server."""

    name: Final = "sandbox1"
    # The address of the private engine's own side: where servers of the tests stand.
    outside: Final = "10.232.0.1"
    address: Final = "10.232.0.2"

    def __init__(self, engine: PrivateEngine, scratch: Path) -> None:
        self.engine: Final = engine
        self.key: Final = scratch / "key"
        self.scratch: Final = scratch

    def start(self) -> None:
        """Make the machine and wait until it has booted. Raises MachineError."""
        tarball = image()
        tag = f"opificia-test-{tarball.stem.replace('-', ':', 1)}"
        if not self._docker("image", "ls", "--quiet", tag):
            self._docker("import", str(tarball), tag)
        self._docker("network", "create", f"--subnet={_SUBNET}", _NETWORK)
        self._docker(
            *("run", "--detach", f"--name={self.name}", f"--hostname={self.name}"),
            *(f"--network={_NETWORK}", f"--ip={self.address}"),
            *("--cap-add=ALL", "--cap-drop=SYS_RESOURCE", "--cgroupns=private"),
            *("--security-opt=seccomp=unconfined", "--security-opt=apparmor=unconfined"),
            "--security-opt=systempaths=unconfined",
            *("--device-cgroup-rule=b 7:* rwm", "--device-cgroup-rule=c 10:237 rwm"),
            # How systemd as a container's first process is told to shut down (systemd(1)).
            "--stop-signal=SIGRTMIN+3",
            *("--tmpfs=/run", "--tmpfs=/tmp", "--env=container=docker"),
            # An overlay cannot lie on an overlay; and a reboot must not lose it.
            f"--volume={self.name}-docker:/var/lib/docker",
            *(tag, "sh", "-c", _BOOT),
        )
        self._await_boot()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key], check=True)
        public = self.key.with_suffix(".pub").read_text()
        self.run("sh", "-c", "install -d -m 700 /root/.ssh && cat > /root/.ssh/authorized_keys", stdin=public)

    @property
    def root(self) -> Path:
        """The machine's files, sockets among them, as they are reached from outside."""
        return Path(f"/proc/{self._docker('inspect', '--format={{.State.Pid}}', self.name)}/root")

    def put(self, source: Path, path: str) -> None:
        """Copy a file to the machine, for all to read."""
        self.run("mkdir", "--parents", str(Path(path).parent))
        target = self.root / path.lstrip("/")
        shutil.copyfile(source, target)
        target.chmod(0o755)

    def reboot(self) -> None:
        """Restart the machine and wait until it has booted."""
        self._docker("restart", "--time=60", self.name)
        self._await_boot()

    def stop(self) -> None:
        """Remove the machine and everything it had."""
        with contextlib.suppress(MachineError):
            # Loop devices are the whole machine's and would stay.
            self.run("sh", "-c", _DETACH)
        for remove in (("rm", "--force", "--volumes", self.name), ("volume", "rm", "--force", f"{self.name}-docker")):
            with contextlib.suppress(MachineError):
                self._docker(*remove)
        with contextlib.suppress(MachineError):
            self._docker("network", "rm", _NETWORK)

    def run(self, *argv: str, stdin: str | None = None, timeout_s: float = 120.0) -> str:
        """Run a command as root on the machine and return its output. Raises MachineError when it fails."""
        return self._docker("exec", "--interactive", self.name, *argv, stdin=stdin, timeout_s=timeout_s)

    def succeeds(self, *argv: str) -> bool:
        """Tell whether a command succeeds."""
        try:
            self.run(*argv)
        except MachineError:
            return False
        return True

    def spawn(self, *argv: str) -> subprocess.Popen[str]:
        """Start a command as root on the machine, its output in a pipe."""
        command = self._command("exec", self.name, *argv)
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def await_unit(self, unit: str, *, not_pid: str = "", timeout_s: float = 180.0) -> str:
        """Wait until a unit is active, with another main process than `not_pid`; return its process id, if it has one."""

        def state() -> list[str]:
            return self.run("systemctl", "show", "--property=ActiveState,MainPID", "--value", unit).split()

        def is_up() -> bool:
            return "active" in state() and not_pid not in state()

        wait_until(is_up, f"{unit} on the machine", timeout_s=timeout_s)
        return next((word for word in state() if word.isdigit()), "")

    def _await_boot(self) -> None:
        def has_booted() -> bool:
            # `degraded` is the answer when a unit failed, which is told by name.
            command = self._command("exec", self.name, "systemctl", "is-system-running")
            return subprocess.run(command, capture_output=True, text=True).stdout.strip() in ("running", "degraded")

        wait_until(has_booted, f"boot of {self.name}", timeout_s=180)

    def _command(self, *arguments: str) -> list[str]:
        return ["docker", "--host", self.engine.url, *arguments]

    def _docker(self, *arguments: str, stdin: str | None = None, timeout_s: float = 300.0) -> str:
        done = subprocess.run(
            self._command(*arguments),
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            said = f"{done.stdout}{done.stderr}"[-4000:]
            raise MachineError(f"{' '.join(arguments)[:300]}: status {done.returncode}\n{said}")
        return done.stdout.strip()


@contextlib.contextmanager
def machine(engine: PrivateEngine, scratch: Path) -> Iterator[Machine]:
    """Run a stand-in for the time of the context."""
    made = Machine(engine, scratch)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@contextlib.contextmanager
def drop_in(target: Machine, unit: str, content: str, *, name: str = "test") -> Iterator[None]:
    """Let a unit differ for the time of the context, as a site's would."""
    folder = f"/run/systemd/system/{unit}.d"
    target.run("mkdir", "-p", folder)
    target.run("sh", "-c", f"cat > {folder}/{name}.conf", stdin=content)
    target.run("systemctl", "daemon-reload")
    try:
        yield
    finally:
        target.run("sh", "-c", f"rm {folder}/{name}.conf && rmdir --ignore-fail-on-non-empty {folder}")
        target.run("systemctl", "daemon-reload")


def missing_programs(programs: Sequence[str]) -> list[str]:
    """Return which of these are not installed on the controller."""
    return [program for program in programs if shutil.which(program) is None]
