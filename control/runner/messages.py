"""Messages between control and the runner in a sandbox: JSON text frames tagged by `type`. Protocol version 1.

The runner says `hello` first; control answers `welcome` with the number of the last event that it has. From then on the
runner sends events, each with the next `seq` (from 1, without gaps), and keeps them until control's `ack`. After a lost
connection it sends again what lies above `welcome.seq`, so nothing is lost and nothing counted twice. Control does the
same with its `run`s: a runner's `hello` names the runs that it knows, the others that have not ended are sent again.

All that a runner says is the word of untrusted code: bounded, strict, and never the reason for anything but itself.
"""

import base64
import enum
import itertools
import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

PROTOCOL_VERSION: Final = 1

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Sequence = Annotated[int, Meta(ge=1, le=2**53)]
Text = Annotated[str, Meta(max_length=8_192)]


def _null() -> msgspec.Raw:
    return msgspec.Raw(b"null")


class Encoding(enum.StrEnum):
    """How `data` stands in a JSON string: as it is, or in base64 when it is not UTF-8."""

    UTF8 = "utf-8"
    BASE64 = "base64"


class Stream(enum.StrEnum):
    """The two outputs of a command."""

    STDOUT = "stdout"
    STDERR = "stderr"


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Runner → control, first. `instance` is new for every runner process.

    `runs` are all runs that it was given, but for those whose end is acknowledged.
    """

    version: int
    instance: Name
    runner: Annotated[str, Meta(max_length=256)] = ""
    runs: Annotated[tuple[Name, ...], Meta(max_length=10_000)] = ()


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Runner → control: how it is doing, in its own words."""

    seq: Sequence
    status: Name
    detail: Text = ""


class Output(msgspec.Struct, frozen=True, tag="output"):
    """Runner → control: a piece of a run's output, for the live view. Docker's logs are the record."""

    seq: Sequence
    run: Name
    stream: Stream
    data: str
    encoding: Encoding = Encoding.UTF8

    def content(self) -> bytes:
        """Return the bytes. Raises ValueError if `data` is not what `encoding` says."""
        return decode_data(self.data, self.encoding)


class ToolCall(msgspec.Struct, frozen=True, tag="tool_call"):
    """Runner → control: the agent calls a tool."""

    seq: Sequence
    call: Name
    name: Name
    arguments: msgspec.Raw = msgspec.field(default_factory=_null)


class ToolResult(msgspec.Struct, frozen=True, tag="tool_result"):
    """Runner → control: the tool answered."""

    seq: Sequence
    call: Name
    ok: bool = True
    content: msgspec.Raw = msgspec.field(default_factory=_null)


class Completed(msgspec.Struct, frozen=True, tag="completed"):
    """Runner → control: a run ended. `exit_code` follows the shell: 128 + N after signal N, 127 not found, 126 not run."""

    seq: Sequence
    run: Name
    exit_code: Annotated[int, Meta(ge=0, le=255)]
    timed_out: bool = False
    error: Text = ""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Runner → control: the answer to `ping`."""

    nonce: Annotated[str, Meta(max_length=64)] = ""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Control → runner: go on after event `seq`. Control pings every `ping_ms`; silence for thrice that is a dead line."""

    version: int
    session: str
    seq: int
    ping_ms: int
    frame_bytes: int


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Control → runner: run a command. A `run` that is known already changes nothing. `timeout_ms` 0: none.

    `env` comes on top of the runner's own environment. What it prints also goes to the runner's own stdout and stderr.
    """

    run: str
    argv: tuple[str, ...]
    cwd: str = "/work"
    env: dict[str, str] = {}
    stdin: str = ""
    stdin_encoding: Encoding = Encoding.UTF8
    timeout_ms: int = 0


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Control → runner: end a run: SIGTERM, after `grace_ms` SIGKILL. An unknown run changes nothing."""

    run: str
    grace_ms: int = 5_000


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Control → runner: answer with `pong`."""

    nonce: str = ""


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """Control → runner: all events up to `seq` are kept; forget them."""

    seq: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Control → runner: end what runs as `cancel` does, then exit with `exit_code`."""

    grace_ms: int = 5_000
    exit_code: int = 0


class ErrorFrame(msgspec.Struct, frozen=True, tag="error"):
    """Control → runner: a frame was not understood or not expected; it was ignored and the connection lives."""

    reason: str
    message: str


Sequenced = Status | Output | ToolCall | ToolResult | Completed
FromRunner = Hello | Sequenced | Pong
ToRunner = Welcome | Run | Cancel | Ping | Ack | Shutdown | ErrorFrame


class FrameError(Exception):
    """A frame that is not of the protocol. `reason` goes into the error frame."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Tag(msgspec.Struct):
    type: str


_decoder: Final = msgspec.json.Decoder(FromRunner)
_tags: Final = frozenset(str(kind.__struct_config__.tag) for kind in FromRunner.__args__)
_tag_decoder: Final = msgspec.json.Decoder(_Tag)
_encoder: Final = msgspec.json.Encoder()
_drop_strings: Final = re.compile(rb'"(?:[^"\\]|\\.)*"').sub
_find_brackets: Final = re.compile(rb"[\[\]{}]").findall


def decode(frame: str | bytes) -> FromRunner:
    """Read one frame of a runner. Raises FrameError."""
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        problem = str(error)
    try:
        tag = _tag_decoder.decode(frame).type
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        raise FrameError("malformed", f"not a message: {problem[:200]}") from None
    if tag not in _tags:
        raise FrameError("unknown_type", f"there is no message of type {tag[:64]!r} in version {PROTOCOL_VERSION}")
    raise FrameError("invalid", f"{tag}: {problem[:200]}")


def encode(message: ToRunner) -> str:
    """Return a message of control as a text frame."""
    return _encoder.encode(message).decode()


def encode_data(data: bytes) -> tuple[str, Encoding]:
    """Return bytes as they stand in a JSON string."""
    try:
        return data.decode(), Encoding.UTF8
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), Encoding.BASE64


def nesting(document: bytes) -> int:
    """Return how deep the arrays and objects of a JSON document are nested."""
    brackets = _find_brackets(_drop_strings(b"", document))
    return max(itertools.accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)


def decode_data(data: str, encoding: Encoding) -> bytes:
    """Return the bytes that stand in a JSON string. Raises ValueError when they are not what `encoding` says."""
    if encoding is Encoding.BASE64:
        return base64.b64decode(data, validate=True)
    return data.encode("utf-8", "surrogatepass")
