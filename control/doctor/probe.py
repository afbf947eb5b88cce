"""The program that `opificia doctor` runs inside a probe sandbox. One file, standard library only, Python 3.8 or later.

It tries what a hostile agent would try, and what an honest one needs. Its argument is a JSON object (see `control.doctor.trial`);
it prints one JSON object a line: `check`, `ok`, `detail`. It is harmless: what it makes it takes away, and it stops at the limits
that it was told.
"""

# ruff: noqa: PTH108, PTH113, PTH118, PTH123, PTH207, T201, S108, S310
# Plain calls on purpose: it must run on any Python, names the sandbox's own folders, and speaks by what it prints.

from __future__ import annotations

import base64
import ctypes
import errno
import glob
import hashlib
import json
import os
import platform
import re
import secrets
import selectors
import signal
import socket
import ssl
import struct
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import NoReturn

    Outcome = tuple[bool, str]

METADATA = "169.254.169.254"
# Two public resolvers' addresses: somebody answers there from anywhere that has a way out.
OUTSIDE_V4, OUTSIDE_V6 = "9.9.9.9", "2620:fe::fe"
CONNECT_S = 1.5
# So many connections are tried at once; a sandbox may have 16,384 files.
AT_ONCE = 1_000
MIB = 1024 * 1024
MEMORY_STEP = 32 * MIB
# A sandbox that does not end at its limit is stopped here, for the host's sake.
MEMORY_SPARE = 256 * MIB
# System calls by machine: (keyctl, io_uring_setup). linux/arch/*/entry/syscalls.
SYSTEM_CALLS = {"x86_64": (250, 425), "aarch64": (219, 425)}
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
AF_VSOCK = 40
# What a provider's key looks like, for hosts that do not tell theirs.
KEY_SHAPE = re.compile(rb"sk-(?:ant-|proj-)?[A-Za-z0-9_-]{32,}")
KEY_FOLDERS = ("/etc", "/home", "/in", "/opificia", "/out", "/root", "/run", "/srv", "/tmp", "/var", "/work")
MAX_FILE = 64 * MIB


def closed(tried: Callable[[], str]) -> Outcome:
    """Do what must fail: an OSError is well, anything else is a hole, described by what `tried` returns."""
    try:
        return False, tried()
    except OSError as error:
        return True, error.strerror or str(error) or type(error).__name__


def reachable(targets: Iterable[tuple[str, int]]) -> list[str]:
    """Return the targets, as `address:port`, at which a TCP connection was made."""
    waiting = list(targets)
    found = []
    while waiting:
        batch, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        found += _reachable(batch)
    return found


def _reachable(targets: list[tuple[str, int]]) -> list[str]:
    found = []
    with selectors.DefaultSelector() as selector:
        for address, port in targets:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
                sock.setblocking(False)
                code = sock.connect_ex((address, port))
            except OSError:
                continue
            if code in (0, errno.EINPROGRESS):
                selector.register(sock, selectors.EVENT_WRITE, f"{address}:{port}")
            else:
                sock.close()
        deadline = time.monotonic() + CONNECT_S
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                sock = key.fileobj  # type: ignore[assignment]  # only sockets were registered
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    found.append(key.data)
                selector.unregister(sock)
                sock.close()
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return found


def unreached(targets: Iterable[tuple[str, int]]) -> Outcome:
    """Say whether none of the targets can be connected to."""
    wanted = list(targets)
    found = reachable(wanted)
    if found:
        return False, f"reached {', '.join(found[:5])}" + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    return True, f"{len(wanted)} tried"


def proxy_says(target: str, user: str, token: str) -> tuple[int, str, socket.socket]:
    """CONNECT through the gateway; return status, reason, and the socket."""
    proxy = urllib.parse.urlsplit(os.environ["OPIFICIA_EGRESS_PROXY"])
    sock = socket.create_connection((proxy.hostname or "", proxy.port or 0), timeout=20)
    credentials = base64.b64encode(f"{user}:{token}".encode()).decode()
    sock.sendall(
        f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nProxy-Authorization: Basic {credentials}\r\n\r\n".encode()
    )
    head = b""
    while b"\r\n\r\n" not in head and len(head) < 65536:
        data = sock.recv(4096)
        if not data:
            break
        head += data
    status = head.split(b" ", 2)[1:2]
    reason = re.search(rb"(?i)\r\nx-opificia-reason: *([a-z_]+)", head)
    return int(status[0]) if status else 0, reason[1].decode() if reason else "", sock


def own_proxy_says(target: str) -> tuple[int, str, socket.socket]:
    """CONNECT with the sandbox's own credentials."""
    return proxy_says(target, os.environ["OPIFICIA_SESSION_ID"], os.environ["OPIFICIA_RUNNER_TOKEN"])


def refused_with(target: str, status: int) -> Outcome:
    """Say whether the gateway refuses a CONNECT with this status."""
    found, reason, sock = own_proxy_says(target)
    sock.close()
    return found == status, f"{found} {reason}"


def metadata(_config: dict[str, Any]) -> Outcome:
    """The cloud's metadata address."""
    ok, detail = unreached([(METADATA, 80)])
    asked, answer = refused_with(f"{METADATA}:80", 403)
    return ok and asked, f"directly: {detail}; by the gateway: {answer}"


def host_ports(config: dict[str, Any]) -> Outcome:
    """Every port that listens on the host, on each of its addresses."""
    return unreached((address, port) for address in config["addresses"] for port in config["ports"])


def host_datagrams(config: dict[str, Any]) -> Outcome:
    """Every UDP port of the host, on each of its addresses: an answer, or the word that nobody is there, came from it."""
    answered = []
    with selectors.DefaultSelector() as selector:
        for address in config["addresses"]:
            for port in config["udp_ports"]:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                sock = socket.socket(family, socket.SOCK_DGRAM)
                sock.setblocking(False)
                try:
                    sock.connect((address, port))
                    sock.send(dns_query("probe.example.com"))
                except OSError:
                    sock.close()
                    continue
                selector.register(sock, selectors.EVENT_READ, f"{address}:{port}")
        sent = len(selector.get_map())
        deadline = time.monotonic() + CONNECT_S
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                sock = key.fileobj  # type: ignore[assignment]  # only sockets were registered
                try:
                    sock.recv(512)
                    answered.append(key.data)
                except ConnectionRefusedError:
                    answered.append(f"{key.data} (closed)")
                except OSError:
                    pass
                selector.unregister(sock)
                sock.close()
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return not answered, f"answered: {', '.join(answered[:5])}" if answered else f"{sent} sent, none answered"


def sibling(config: dict[str, Any]) -> Outcome:
    """Another sandbox, in which a server listens."""
    return unreached([(config["sibling"], config["sibling_port"])])


def outside(_config: dict[str, Any]) -> Outcome:
    """The internet past the gateway."""
    return unreached([(OUTSIDE_V4, 53), (OUTSIDE_V4, 443), (OUTSIDE_V6, 53), (OUTSIDE_V6, 443)])


def dns_query(name: str) -> bytes:
    """Return a question for the address of a name (RFC 1035 §4.1)."""
    question = b"".join(bytes([len(label)]) + label for label in name.encode().split(b".")) + b"\0\0\1\0\1"
    return struct.pack(">6H", secrets.randbelow(65536), 0x0100, 1, 0, 0, 0) + question


def dns(_config: dict[str, Any]) -> Outcome:
    """A made-up name, by the system's resolver and by the engine's embedded one."""
    name = f"probe-{secrets.token_hex(6)}.example.com"
    try:
        return False, f"{name} resolved to {socket.gethostbyname(name)}"
    except OSError:
        pass
    query = dns_query(name)
    for server in ("127.0.0.11", OUTSIDE_V4):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(CONNECT_S)
            try:
                sock.connect((server, 53))
                sock.send(query)
                sock.recv(512)
            except OSError:
                continue
            return False, f"{server} answered"
    return True, "no resolver answers"


def ipv6(_config: dict[str, Any]) -> Outcome:
    """An IPv6 address of its own."""
    try:
        with open("/proc/net/if_inet6") as file:
            addresses = [line.split() for line in file]
    except OSError:
        return True, "no IPv6 in this kernel"
    found = [fields[0] for fields in addresses if fields[-1] != "lo"]
    return not found, f"has {', '.join(found)}" if found else "no address"


def raw_sockets(_config: dict[str, Any]) -> Outcome:
    """Sockets that forge packets or pass by the network."""
    opened = []
    for name, family, kind in (
        ("raw", socket.AF_INET, socket.SOCK_RAW),
        ("packet", socket.AF_PACKET, socket.SOCK_RAW),
        ("vsock", AF_VSOCK, socket.SOCK_STREAM),
    ):
        try:
            socket.socket(family, kind).close()
        except OSError:
            continue
        opened.append(name)
    return not opened, f"opened: {', '.join(opened)}" if opened else "refused"


def _call(name: str, *arguments: Any) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    result = getattr(libc, name)(*arguments)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return f"{name} was allowed"


def namespaces(_config: dict[str, Any]) -> Outcome:
    """Namespaces of its own, in which it would be root."""
    made = []
    for name, flag in (("user", CLONE_NEWUSER), ("network", CLONE_NEWNET), ("mount", CLONE_NEWNS)):
        # In a child: a namespace that could be made would hold for the rest of the probe.
        child = os.fork()
        if child == 0:
            try:
                _call("unshare", flag)
            except OSError:
                os._exit(0)
            os._exit(1)
        if os.waitpid(child, 0)[1]:
            made.append(name)
    return not made, f"made: {', '.join(made)}" if made else "refused"


def mount(_config: dict[str, Any]) -> Outcome:
    """A file system of its own."""
    return closed(lambda: _call("mount", b"none", b"/work", b"tmpfs", 0, None))


def kernel_settings(_config: dict[str, Any]) -> Outcome:
    """The kernel's settings."""
    written = []
    for path in ("/proc/sys/net/ipv4/ip_forward", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"):
        try:
            # Opened only: a value written would be the host's.
            os.close(os.open(path, os.O_WRONLY))
        except OSError:
            continue
        written.append(path)
    return not written, f"may be written: {', '.join(written)}" if written else "refused"


def system_calls(_config: dict[str, Any]) -> Outcome:
    """The kernel's keyring, which is not divided by containers, and io_uring, which passes by filters."""
    numbers = SYSTEM_CALLS.get(platform.machine())
    if numbers is None:
        return False, f"the numbers for {platform.machine()} are not known"
    allowed = []
    # KEYCTL_GET_KEYRING_ID of the session's keyring; io_uring_setup with a null pointer would be EFAULT.
    for name, arguments in (("keyctl", (numbers[0], 0, -3, 0)), ("io_uring_setup", (numbers[1], 1, None))):
        try:
            _call("syscall", *arguments)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS):
                continue
        allowed.append(name)
    return not allowed, f"allowed: {', '.join(allowed)}" if allowed else "refused"


def root_file_system(_config: dict[str, Any]) -> Outcome:
    """Files of the image, its input, its runner."""
    written = []
    for folder in ("/", "/etc", "/usr/bin", "/usr/local/bin", "/var", "/in", "/opificia"):
        path = os.path.join(folder, "probe")
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except OSError:
            continue
        os.unlink(path)
        written.append(folder)
    return not written, f"may be written: {', '.join(written)}" if written else "read-only"


def privileges(_config: dict[str, Any]) -> Outcome:
    """Capabilities, and ways to get them."""
    with open("/proc/self/status") as file:
        status = dict(line.rstrip().split(":\t", 1) for line in file if ":\t" in line)
    problems = [f"{name} {status[name]}" for name in ("CapEff", "CapPrm", "CapBnd") if int(status[name], 16)]
    problems += [] if status["NoNewPrivs"] == "1" else ["new privileges may be gained"]
    problems += [] if status["Seccomp"] == "2" else ["no seccomp filter"]
    problems += ["runs as root"] if os.getuid() == 0 else []
    return not problems, "; ".join(problems) or f"uid {os.getuid()}, none"


def processes(config: dict[str, Any]) -> Outcome:
    """More processes than allowed."""
    children: list[int] = []
    try:
        for _ in range(config["pids"] + 16):
            child = os.fork()
            if child == 0:
                # Ends with the probe, whatever becomes of it.
                _call("prctl", 1, signal.SIGKILL)
                signal.pause()
                os._exit(0)
            children.append(child)
    except OSError as error:
        return error.errno == errno.EAGAIN, f"{error.strerror} after {len(children)} of {config['pids']}"
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return False, f"{len(children)} were started, {config['pids']} are allowed"


def _memory_limit() -> int:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else 1 << 62
    return 1 << 62


def memory(config: dict[str, Any]) -> Outcome:
    """More memory than allowed."""
    wanted = config["memory_bytes"]
    limit = _memory_limit()
    if limit > wanted:
        # Not tried: without a limit it would be the host's memory.
        return False, f"{wanted} bytes are allowed, the kernel's limit is {limit}"
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    if available < 2 * limit:
        return True, f"the kernel's limit is {limit} bytes; not tried, the host has {available} left"
    child = os.fork()
    if child == 0:
        _take_memory(limit + MEMORY_SPARE)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return killed, f"killed at {limit} bytes" if killed else f"took more than {limit} bytes"


def _take_memory(size: int) -> NoReturn:
    # The kernel is to choose this process, not the runner.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    held: list[bytes] = []
    while len(held) * MEMORY_STEP < size:
        held.append(b"x" * MEMORY_STEP)
    os._exit(0)


def disk(config: dict[str, Any]) -> Outcome:
    """More in /out than allowed."""
    path = "/out/.probe"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        # Reserved, not written: the limit shows at once.
        os.posix_fallocate(fd, 0, config["out_bytes"] + MIB)
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EFBIG), f"{error.strerror} below {config['out_bytes'] + MIB} bytes"
    finally:
        os.close(fd)
        os.unlink(path)
    return False, f"{config['out_bytes'] + MIB} bytes could be taken"


def operators_key(config: dict[str, Any]) -> Outcome:
    """The operator's model key, in environments, command lines and files."""
    own = [os.environ["OPIFICIA_RUNNER_TOKEN"].encode()]
    places: set[str] = set()
    read = 0
    for path in _readable():
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_FILE)
        except OSError:
            continue
        read += 1
        if config["key_sha256"]:
            if _holds(data, config["key_prefix"].encode(), config["key_length"], config["key_sha256"]):
                places.add(path)
        elif any(found not in own for found in KEY_SHAPE.findall(data)):
            places.add(path)
    looked = "for it" if config["key_sha256"] else "for what looks like one"
    return not places, f"in {', '.join(sorted(places)[:5])}" if places else f"searched {read} files {looked}"


def _holds(data: bytes, prefix: bytes, length: int, digest: str) -> bool:
    # The key itself never comes here: whatever follows its first characters is hashed.
    at = data.find(prefix)
    while at >= 0:
        if hashlib.sha256(data[at : at + length]).hexdigest() == digest:
            return True
        at = data.find(prefix, at + 1)
    return False


def _readable() -> Iterable[str]:
    for kind in ("environ", "cmdline", "mountinfo"):
        yield from glob.glob(f"/proc/[0-9]*/{kind}")
    for top in KEY_FOLDERS:
        for folder, _, names in os.walk(top):
            for name in names:
                path = os.path.join(folder, name)
                # A FIFO would be waited for.
                if os.path.isfile(path):
                    yield path


def other_token(config: dict[str, Any]) -> Outcome:
    """Another session's token."""
    status, reason, sock = proxy_says(f"{config['registry']}:443", config["sibling_session"], config["sibling_token"])
    sock.close()
    return status == 407, f"{status} {reason}"


def unlisted(_config: dict[str, Any]) -> Outcome:
    """A host that is on no list."""
    return refused_with(f"probe-{secrets.token_hex(6)}.example.com:443", 403)


def registry(config: dict[str, Any]) -> Outcome:
    """A package registry, by the gateway."""
    status, reason, sock = own_proxy_says(f"{config['registry']}:443")
    if status != 200:
        sock.close()
        return False, f"{config['registry']}: {status} {reason}"
    context = ssl.create_default_context()
    with context.wrap_socket(sock, server_hostname=config["registry"]) as secure:
        return True, f"by {secure.version()}"


def model(_config: dict[str, Any]) -> Outcome:
    """The model API, by the gateway."""
    request = urllib.request.Request(
        f"{os.environ['ANTHROPIC_BASE_URL']}/v1/models",
        headers={"x-api-key": os.environ["OPIFICIA_RUNNER_TOKEN"], "anthropic-version": "2023-06-01"},
    )
    # The gateway itself is spoken to directly.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=15) as answer:
            return True, f"status {answer.status}"
    except urllib.error.HTTPError as error:
        reason = error.headers.get("X-Opificia-Reason", "")
        return False, f"status {error.code} {reason or 'from the provider'}"


# In the order in which they are shown. The last fill and exhaust, so they come when nothing else runs any more.
CHECKS = (
    metadata,
    host_ports,
    host_datagrams,
    sibling,
    outside,
    dns,
    ipv6,
    raw_sockets,
    namespaces,
    mount,
    kernel_settings,
    system_calls,
    root_file_system,
    privileges,
    operators_key,
    other_token,
    unlisted,
    registry,
    model,
    disk,
    processes,
    memory,
)


def main() -> None:
    """Run all checks; one that fails in an unexpected way is not well."""
    config = json.loads(sys.argv[1])
    for check in CHECKS:
        try:
            ok, detail = check(config)
        except Exception as error:  # what a hostile host answers is not known beforehand
            ok, detail = False, f"{type(error).__name__}: {error}"
        print(json.dumps({"check": check.__name__, "ok": ok, "detail": detail}), flush=True)


if __name__ == "__main__":
    main()
