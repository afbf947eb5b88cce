"""The usual ways out of a container, tried from inside a live sandbox: a test for each.

Sources: moby's seccomp documentation (system calls and what they were used for), runc's CVE-2019-5736 and CVE-2024-21626,
"shocker" (open_by_handle_at), CVE-2022-0492 (release_agent), deepce's list of files.
"""

from pathlib import Path
from typing import Final

import pytest

from tests.docker.snapshot import Snapshot, look
from tests.support.engine import PrivateEngine

# Numbers are x86-64's; `unused` arguments are zero, so a call that got through would fail in another way than these.
_PROBES: Final = r"""
import ctypes, json, os, socket, stat

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def call(number, *arguments):
    ctypes.set_errno(0)
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = libc.syscall(ctypes.c_long(number), *given)
    return "allowed" if result >= 0 else os.strerror(ctypes.get_errno())

def attempt(action):
    try:
        action()
    except OSError as error:
        return error.strerror
    return "allowed"

def enter(path):
    namespace = os.open(path, os.O_RDONLY)
    try:
        return call(308, namespace, 0)
    finally:
        os.close(namespace)

def family(number, kind=socket.SOCK_STREAM, protocol=0):
    return attempt(lambda: socket.socket(number, kind, protocol).close())

def writable(top, skip):
    # Opening is harmless and tells; nothing is written.
    found = []
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if not skip(folder, name)]
        for name in files:
            path = os.path.join(folder, name)
            try:
                if stat.S_ISREG(os.lstat(path).st_mode):
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                    found.append(path)
            except OSError:
                pass
    return found

def readable(path):
    try:
        if os.path.isdir(path):
            return os.listdir(path) != []
        with open(path, "rb") as file:
            return file.read(1) != b""
    except OSError:
        return False

def sockets():
    found = []
    for folder, folders, files in os.walk("/", onerror=None):
        if folder in ("/proc", "/sys"):
            folders[:] = []
        for name in files:
            path = os.path.join(folder, name)
            try:
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    found.append(path)
            except OSError:
                pass
    return found

def devices():
    found = []
    for folder, folders, files in os.walk("/dev"):
        for name in files:
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
                found.append(path)
    return sorted(found)

def descriptors(pid):
    folder = "/proc/%s/fd" % pid
    found = []
    for name in os.listdir(folder):
        try:
            found.append(os.readlink(os.path.join(folder, name)))
        except OSError:
            pass
    return sorted(found)

params = ctypes.create_string_buffer(256)
handle = ctypes.create_string_buffer(b"\x08\0\0\0\x01\0\0\0\x02\0\0\0\0\0\0\0", 64)
calls = {
    "acct": call(163, 0),
    "add_key": call(248, b"user", b"x", b"y", 1, -3),
    "bpf": call(321, 0, params, 128),
    "clock_settime": call(227, 0, params),
    "clone into a user namespace": call(56, 0x10000000 | 17, 0, 0, 0, 0),
    "delete_module": call(176, b"x", 0),
    "fanotify_init": call(300, 0, 0),
    "finit_module": call(313, 0, b"", 0),
    "fsopen": call(430, b"tmpfs", 0),
    "init_module": call(175, params, 0, b""),
    "ioperm": call(173, 0, 1, 1),
    "iopl": call(172, 3),
    "kexec_load": call(246, 0, 0, 0, 0),
    "keyctl": call(250, 0, 0, 0),
    "mount": call(165, b"none", b"/work", b"tmpfs", 0, 0),
    "move_mount": call(429, 0, b"", 0, b"", 0),
    "open_by_handle_at": call(304, -100, handle, 0),
    "open_tree": call(428, -100, b"/", 1),
    "perf_event_open": call(298, params, 0, -1, -1, 0),
    "pivot_root": call(155, b"/work", b"/work"),
    "quotactl": call(179, 0, 0, 0, 0),
    "reboot": call(169, 0, 0, 0, 0),
    "request_key": call(249, b"user", b"x", 0, -3),
    "sethostname": call(170, b"x", 1),
    "setns": enter("/proc/self/ns/net"),
    "swapon": call(167, b"/work/x", 0),
    "syslog": call(103, 3, params, 200),
    "umount2": call(166, b"/in", 2),
    "userfaultfd": call(323, 0),
    **{
        "unshare " + name: call(272, flag)
        for name, flag in (
            ("cgroup", 0x02000000), ("ipc", 0x08000000), ("mount", 0x00020000), ("network", 0x40000000),
            ("pid", 0x20000000), ("user", 0x10000000), ("uts", 0x04000000),
        )
    },
    "chroot": attempt(lambda: os.chroot("/work")),
    "setuid": attempt(lambda: os.setuid(0)),
    "setgroups": attempt(lambda: os.setgroups([0])),
    "mknod a memory device": attempt(lambda: os.mknod("/work/mem", 0o20600, os.makedev(1, 1))),
    "mknod a disk": attempt(lambda: os.mknod("/work/disk", 0o60600, os.makedev(7, 0))),
}
print(json.dumps({
    "calls": calls,
    "absent calls": {"io_uring_setup": call(425, 4, params), "clone3": call(435, params, 88)},
    "families": {
        "AF_ALG": family(38, socket.SOCK_SEQPACKET),
        "AF_PACKET": family(17, socket.SOCK_RAW),
        "AF_VSOCK": family(40),
        "raw IPv4": family(2, socket.SOCK_RAW, 1),
    },
    "kernel files": writable("/proc", lambda folder, name: folder == "/proc" and (name.isdigit() or name in ("self", "thread-self")))
        + writable("/sys", lambda folder, name: False),
    "masked": [path for path in (
        "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug",
        "/proc/scsi", "/proc/acpi", "/proc/asound", "/sys/firmware", "/dev/kmsg", "/dev/mem", "/proc/kmsg",
    ) if readable(path)],
    "release_agent": [p for p in (os.path.join(f, "release_agent") for f, _, _ in os.walk("/sys/fs/cgroup")) if os.access(p, os.W_OK)],
    "cgroup": attempt(lambda: os.mkdir("/sys/fs/cgroup/memory/x" if os.path.isdir("/sys/fs/cgroup/memory") else "/sys/fs/cgroup/x")),
    "first program": attempt(lambda: os.close(os.open("/proc/1/exe", os.O_WRONLY))),
    "descriptors": {pid: descriptors(pid) for pid in ("1", "self")},
    "working folders": [os.readlink("/proc/%s/cwd" % pid) for pid in ("1", "self")],
    "sockets": sockets(),
    "abstract sockets": [line.split()[-1] for line in open("/proc/net/unix").read().splitlines()[1:] if line.split()[-1].startswith("@")],
    "devices": devices(),
    "namespaces": {name: os.readlink("/proc/self/ns/" + name) for name in os.listdir("/proc/self/ns")},
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    "status": dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line),
    "setuid programs": [p for p in (os.path.join(f, n) for f, _, names in os.walk("/usr") for n in names) if os.lstat(p).st_mode & 0o6000 and not stat.S_ISLNK(os.lstat(p).st_mode)],
    "su": os.popen("su -c id 2>&1 </dev/null").read(),
    "secrets": [path for path in ("/root", "/etc/shadow", "/opificia", "/run/secrets") if readable(path) and path != "/opificia"],
}))
"""
_CALLS: Final = (
    *("acct", "add_key", "bpf", "chroot", "clock_settime", "clone into a user namespace", "delete_module"),
    *("fanotify_init", "finit_module", "fsopen", "init_module", "ioperm", "iopl", "kexec_load", "keyctl"),
    *("mknod a disk", "mknod a memory device", "mount", "move_mount", "open_by_handle_at", "open_tree"),
    *("perf_event_open", "pivot_root", "quotactl", "reboot", "request_key", "setgroups", "sethostname", "setns"),
    *("setuid", "swapon", "syslog", "umount2", "userfaultfd"),
    *(f"unshare {name}" for name in ("cgroup", "ipc", "mount", "network", "pid", "user", "uts")),
)


@pytest.fixture(scope="module")
def tried(engine: PrivateEngine, prepared: list[str], tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return look(engine, tmp_path_factory.mktemp("escapes"), _PROBES)


@pytest.mark.parametrize("call", _CALLS)
def test_system_call_is_not_permitted(tried: Snapshot, call: str) -> None:
    assert tried.inside["calls"][call] == "Operation not permitted"


def test_every_call_that_is_tried_is_judged(tried: Snapshot) -> None:
    assert set(_CALLS) == set(tried.inside["calls"])


@pytest.mark.parametrize("call", ["io_uring_setup", "clone3"])
def test_system_call_is_not_there(tried: Snapshot, call: str) -> None:
    # "Not implemented" makes programs fall back to what there is.
    assert tried.inside["absent calls"][call] == "Function not implemented"


@pytest.mark.parametrize("family", ["AF_ALG", "AF_PACKET", "AF_VSOCK", "raw IPv4"])
def test_kind_of_socket_is_not_permitted(tried: Snapshot, family: str) -> None:
    assert tried.inside["families"][family] == "Operation not permitted"


def test_no_process_has_a_capability_or_can_gain_one(tried: Snapshot) -> None:
    status = tried.inside["status"]
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert "uid=0" not in tried.inside["su"]


def test_no_file_of_the_kernel_is_writable(tried: Snapshot) -> None:
    """All of /proc and /sys: core_pattern, modprobe, sysrq-trigger, binfmt_misc, uevent_helper and whatever comes next."""
    assert tried.inside["kernel files"] == []


def test_no_cgroup_can_be_made_or_given_an_agent(tried: Snapshot) -> None:
    assert tried.inside["release_agent"] == []
    assert tried.inside["cgroup"] == "Read-only file system"


def test_what_tells_of_the_kernel_is_masked(tried: Snapshot) -> None:
    assert tried.inside["masked"] == []


def test_the_first_program_cannot_be_overwritten(tried: Snapshot) -> None:
    """CVE-2019-5736 went by /proc/…/exe."""
    assert tried.inside["first program"] != "allowed"


def test_no_descriptor_and_no_working_folder_leads_to_the_host(tried: Snapshot) -> None:
    """CVE-2024-21626 went by a descriptor that runc had left open."""
    for found in tried.inside["descriptors"].values():
        assert not [each for each in found if not each.startswith(("pipe:", "/dev/null", "/proc/"))]
    assert set(tried.inside["working folders"]) == {"/work"}


def test_no_socket_of_the_host_is_in_reach(tried: Snapshot) -> None:
    assert tried.inside["sockets"] == []
    assert tried.inside["abstract sockets"] == []


def test_only_harmless_devices_are_there(tried: Snapshot) -> None:
    harmless = {"full", "null", "ptmx", "random", "tty", "urandom", "zero"}
    assert {path.removeprefix("/dev/") for path in tried.inside["devices"]} <= harmless | {"pts/ptmx"}


@pytest.mark.parametrize("kind", ["cgroup", "ipc", "mnt", "net", "pid", "uts"])
def test_namespace_is_its_own(tried: Snapshot, kind: str) -> None:
    assert tried.inside["namespaces"][kind] != str(Path(f"/proc/self/ns/{kind}").readlink())


def test_processes_of_the_host_are_not_in_sight(tried: Snapshot) -> None:
    assert len(tried.inside["processes"]) < 20
    assert max(tried.inside["processes"]) < min(1_000, int(Path("/proc/sys/kernel/pid_max").read_text()))


def test_no_secret_of_root_is_readable(tried: Snapshot) -> None:
    assert tried.inside["secrets"] == []
