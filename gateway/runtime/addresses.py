"""Listen and connect addresses as they stand in settings: `unix:/path`, `host:port`, `[v6]:port`."""

import errno
import ipaddress
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_REMEDIES: Final = {
    errno.EADDRINUSE: "stop what uses it or change it under [listen]",
    errno.EACCES: "give the daemon's user the right to it or change it under [listen]",
    errno.ENOENT: "make its folder, writable for the daemon's user, or change it under [listen]",
}


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A unix socket by its path."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP address; `host` is an IP literal without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class AddressError(ValueError):
    """Not an address; the message says what was expected."""


def parse_address(text: str) -> UnixAddress | TcpAddress:
    """Read `unix:/absolute/path`, `127.0.0.1:8900` or `[::1]:8900`. Raises AddressError."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        # sun_path holds 108 bytes with its closing NUL (unix(7)).
        if not path.startswith("/") or len(path.encode()) > 107:
            raise AddressError(f"{text!r} needs an absolute path of at most 107 bytes")
        return UnixAddress(path)
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise AddressError(f"{text!r} is neither unix:/path nor IP-address:port") from None
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise AddressError(f"{text!r} has no port between 0 and 65535")
    return TcpAddress(host, int(port))


def address_problems(name: str, text: str, *, unix_only: bool = False) -> list[str]:
    """Return what is wrong with the address in the setting `name`, as `setting: sentence`."""
    try:
        address = parse_address(text)
    except AddressError as error:
        return [f"{name}: {error}"]
    if unix_only and not isinstance(address, UnixAddress):
        return [f"{name}: {text!r} must be a unix socket, unix:/path: whoever can connect is trusted"]
    return []


class ListenError(Exception):
    """A listening socket could not be made; the message is one sentence with the remedy."""


def listen(address: UnixAddress | TcpAddress, backlog: int = 8192, mode: int = 0o660) -> socket.socket:
    """Return a non-blocking listening socket on `address`.

    A unix socket left by a process that is gone is replaced; one that answers is not. Raises ListenError.
    """
    if isinstance(address, TcpAddress):
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        server = socket.socket(family, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        target: tuple[str, int] | str = (address.host, address.port)
    else:
        _remove_stale(address)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target = address.path
    try:
        server.bind(target)
        if isinstance(address, UnixAddress):
            Path(address.path).chmod(mode)
        server.listen(backlog)
    except OSError as error:
        server.close()
        raise _refused(address, error) from error
    server.setblocking(False)
    return server


def _remove_stale(address: UnixAddress) -> None:
    """Remove the socket file that a killed process left. bind(2) refuses an existing name even when nobody listens."""
    path = Path(address.path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            # connect(2) says so of any other file as well, and that is somebody's.
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ListenError(
                    f"cannot listen on {address}: there is a file that is no socket; move it away"
                ) from None
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise _refused(address, error) from error
        except OSError:
            return
        else:
            raise ListenError(f"cannot listen on {address}: another process answers there; stop it first")


def _refused(address: UnixAddress | TcpAddress, error: OSError) -> ListenError:
    remedy = _REMEDIES.get(error.errno or 0, "change it under [listen]")
    return ListenError(f"cannot listen on {address}: {error.strerror}; {remedy}")
