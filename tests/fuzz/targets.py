"""What must hold for any bytes, per parser. A target returns quietly or fails an assertion."""

from collections.abc import Callable
from typing import Final

from gateway.core.authority import AuthorityError, parse_absolute_http, parse_authority
from gateway.core.clienthello import ClientHello, HelloError, parse_client_hello
from gateway.core.head import MAX_HEADERS, Head, HeadError, body_framing, parse_head
from gateway.core.proxy_header import MAX_PROXY_HEADER_BYTES, ProxyHeader, ProxyHeaderError, parse_proxy_header
from tests.fuzz.client_targets import CLIENT_TARGETS
from tests.fuzz.contract_targets import CONTRACT_TARGETS
from tests.fuzz.control_targets import CONTROL_TARGETS
from tests.fuzz.docker_targets import DOCKER_TARGETS
from tests.fuzz.handover_targets import HANDOVER_TARGETS
from tests.fuzz.identity_targets import IDENTITY_TARGETS
from tests.fuzz.model_targets import MODEL_TARGETS
from tests.fuzz.plain_targets import PLAIN_TARGETS
from tests.fuzz.properties import check_message, settled

Target = Callable[[bytes], None]
_HEAD_LIMIT: Final = 2048
_HELLO_LIMIT: Final = 2048


def head(data: bytes) -> None:
    """`parse_head` and `body_framing`."""

    def parse(raw: bytes) -> object:
        try:
            return parse_head(raw, _HEAD_LIMIT)
        except HeadError as error:
            check_message(error.message)
            return error.status, error.reason

    result = parse(data)
    settled(parse, data, result)
    if not isinstance(result, Head):
        return
    assert data[: result.size].endswith(b"\r\n\r\n")
    assert data.find(b"\r\n\r\n") == result.size - 4 <= _HEAD_LIMIT - 4
    assert len(result.headers) <= MAX_HEADERS
    # Written out again it reads as the same request: nothing was dropped, joined or repaired.
    lines = b"".join(name + b":" + value + b"\r\n" for name, value in result.headers)
    written = b"%b %b HTTP/1.%d\r\n%b\r\n" % (result.method, result.target, result.minor_version, lines)
    again = parse_head(written, _HEAD_LIMIT)
    assert isinstance(again, Head)
    assert (again.method, again.target, again.headers) == (result.method, result.target, result.headers)
    assert data[: result.size].count(b"\n") == len(result.headers) + 2
    try:
        body_framing(result)
    except HeadError as error:
        check_message(error.message)


def proxy_header(data: bytes) -> None:
    """`parse_proxy_header`."""

    def parse(raw: bytes) -> object:
        try:
            return parse_proxy_header(raw)
        except ProxyHeaderError:
            return "refused"

    result = parse(data)
    settled(parse, data, result)
    if isinstance(result, ProxyHeader):
        assert 16 <= result.size <= min(len(data), MAX_PROXY_HEADER_BYTES)
        assert (result.source is None) == (data[12] == 0x20)


def authority(data: bytes) -> None:
    """`parse_authority` and `parse_absolute_http`."""
    try:
        found = parse_authority(data, 80)
    except AuthorityError as error:
        check_message(error.message)
    else:
        assert found.host.isascii()
        assert found.host == found.host.lower()
        assert not set(found.host) & set(" /\\@%#?[]\r\n\0")
        assert 0 < found.port <= 65535
        assert parse_authority(str(found).encode()) == found
    try:
        parse_absolute_http(data)
    except AuthorityError as error:
        check_message(error.message)


def client_hello(data: bytes) -> None:
    """`parse_client_hello`."""

    def parse(raw: bytes) -> object:
        try:
            return parse_client_hello(raw, _HELLO_LIMIT)
        except HelloError as error:
            check_message(error.message)
            return error.reason

    result = parse(data)
    settled(parse, data, result)
    if isinstance(result, ClientHello) and result.server_name is not None:
        assert result.server_name.isascii()
        assert not set(result.server_name) & set(" :/\\@%[]\r\n\0")


TARGETS: Final[dict[str, Target]] = {
    "head": head,
    "proxy_header": proxy_header,
    "authority": authority,
    "client_hello": client_hello,
    **MODEL_TARGETS,
    **PLAIN_TARGETS,
    **IDENTITY_TARGETS,
    **HANDOVER_TARGETS,
    **CONTRACT_TARGETS,
    **CONTROL_TARGETS,
    **DOCKER_TARGETS,
    **CLIENT_TARGETS,
}
