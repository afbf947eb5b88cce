"""What a provider's reply says it used, read from the bytes that pass by.

Anthropic sends cumulative counts: `message_start` has all of them with a first `output_tokens`, `message_delta` has the
final ones; a later value replaces an earlier one, a field that is missing changes nothing
(https://docs.anthropic.com/en/docs/build-with-claude/streaming). OpenAI counts cached tokens as part of the input; here
they are apart, as Anthropic has them. Nothing is kept of the content.
"""

from abc import ABC, abstractmethod
from typing import Final

import msgspec

# A line of an event stream that may hold usage: OpenAI's `response.completed` repeats the whole reply in one line.
MAX_LINE_BYTES: Final = 4 * 1024 * 1024
# A reply that is not a stream is read whole for its usage; max_tokens of 200,000 makes about 1 MiB.
MAX_JSON_BYTES: Final = 8 * 1024 * 1024
# What a session's requests together keep of their replies, beyond the first KEPT_UNCOUNTED_BYTES of each, which is as much as
# a connection's buffers hold. 64 replies of the usual size are far below it; without it, 64 of the largest were 512 MiB.
MAX_KEPT_BYTES: Final = 16 * 1024 * 1024
KEPT_UNCOUNTED_BYTES: Final = 64 * 1024
MAX_MODEL_CHARS: Final = 128
# More than any model gives in one reply, and small enough to be summed up: what processes tell each other holds 64 bits.
MAX_TOKENS: Final = 1 << 40
_MARK: Final = b'"usage"'
_LINE_ENDS: Final = (b"\n", b"\r\n")
_BLANK_LINES: Final = (b"\n\n", b"\n\r\n")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Counts(msgspec.Struct):
    """The usage object, in the spellings of all providers that are known."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    input_tokens_details: _Details | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Inner(msgspec.Struct):
    model: str | None = None
    usage: _Counts | None = None


class _Typed(msgspec.Struct):
    type: str = ""


class _Reply(msgspec.Struct):
    """A reply, or one event of a stream. Anthropic nests the first counts in `message`, OpenAI's responses in `response`."""

    model: str | None = None
    usage: _Counts | None = None
    message: _Inner | str | None = None
    response: _Inner | str | None = None


_decode: Final = msgspec.json.Decoder(_Reply).decode
_is_whole: Final = msgspec.json.Decoder(msgspec.Raw).decode
_decode_type: Final = msgspec.json.Decoder(_Typed).decode


class TokenUsage(msgspec.Struct):
    """Tokens of one request. `input_tokens` are those that were neither read from nor written to the cache."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0


class Kept:
    """How many bytes of their replies the requests of one session keep, to read what they used."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 0


class UsageReader(ABC):
    """Gathers the usage of one reply. `feed` takes the body without its transfer coding, in pieces cut anywhere.

    `final` tells whether counts for the whole reply were read, `model` which model answered. What is kept of a large reply is
    counted in `kept`; one for which there is no room is not read. Ends with `end` or `drop`.
    """

    __slots__ = ("_counted", "_kept", "final", "model", "usage")

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        # What of `kept` is this reply's.
        self._counted = 0
        self.usage = TokenUsage()
        self.model = ""
        self.final = False

    @abstractmethod
    def feed(self, data: bytes) -> None:
        """Take a piece of the body."""

    @abstractmethod
    def end(self) -> None:
        """The body is whole."""

    def drop(self) -> None:
        """The body was cut: keep nothing of it."""
        self._keep(0)

    def _keep(self, size: int) -> bool:
        """Have `size` bytes of this reply counted as kept; False, and none, if that is more than there is room for."""
        self._kept.size -= self._counted
        self._counted = size if self._kept.size + size <= MAX_KEPT_BYTES else 0
        self._kept.size += self._counted
        return self._counted == size

    def ends_with(self, markers: tuple[bytes, ...]) -> bool:
        """Tell whether a body that ended with its connection is whole: its last event is one of `markers`, or it is JSON."""
        return True

    def _take(self, data: bytes) -> None:
        try:
            reply = _decode(data)
        except (msgspec.MsgspecError, RecursionError):
            return
        if reply.model:
            self._name(reply.model)
        for nested in (reply.message, reply.response):
            if isinstance(nested, _Inner):
                if nested.model:
                    self._name(nested.model)
                if nested.usage is not None:
                    self._merge(nested.usage)
                    self.final |= nested is reply.response
        if reply.usage is not None:
            self._merge(reply.usage)
            self.final = True

    def _name(self, model: str) -> None:
        # ASCII, because it is logged as a line and JSON may hold newlines of other alphabets.
        self.model = model[:MAX_MODEL_CHARS]
        if not self.model.isascii():
            self.model = self.model.encode("ascii", "backslashreplace").decode()

    def _merge(self, counts: _Counts) -> None:
        usage = self.usage
        read = counts.cache_read_input_tokens
        fresh = counts.input_tokens if counts.input_tokens is not None else counts.prompt_tokens
        details = counts.input_tokens_details or counts.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            read = details.cached_tokens
            fresh = fresh - read if fresh is not None else None
        written = counts.cache_creation_input_tokens
        made = counts.output_tokens if counts.output_tokens is not None else counts.completion_tokens
        if fresh is not None:
            usage.input_tokens = _bounded(fresh)
        if read is not None:
            usage.cache_read_tokens = _bounded(read)
        if written is not None:
            usage.cache_write_tokens = _bounded(written)
        if made is not None:
            usage.output_tokens = _bounded(made)


def _bounded(count: int) -> int:
    # A negative count would refill a budget; no provider sends one.
    return min(max(0, count), MAX_TOKENS)


class StreamUsage(UsageReader):
    """Reads server-sent events line by line; a line without the word `"usage"` costs two searches and nothing more."""

    __slots__ = ("_held", "_last", "_size", "_tail")

    def __init__(self, kept: Kept) -> None:
        super().__init__(kept)
        # The pieces of a line that has not ended yet, joined only when it has: a long line costs its length once.
        self._held: list[bytes] = []
        self._size = 0
        # The last lines that were more than an end of line, and the last of all.
        self._last = self._tail = b""

    def feed(self, data: bytes) -> None:
        end = data.rfind(b"\n") + 1
        if end != len(data) or self._held:
            data = self._whole_lines(data, end)
        if data:
            self._tail = data
        if len(data) > 2:
            self._last = data
            if _MARK in data:
                self._read_lines(data)

    def end(self) -> None:
        if self._held:
            self.feed(b"\n")

    def ends_with(self, markers: tuple[bytes, ...]) -> bool:
        """The last event counts when it has its empty line, and says itself that it is one: its text may name a marker too."""
        if self._held or not (self._tail in _LINE_ENDS or self._tail.endswith(_BLANK_LINES)):
            return False
        return not markers or _named_by(self._last) in markers

    def _whole_lines(self, data: bytes, end: int) -> bytes:
        """Hold what follows the last newline; return what precedes it, with what was held before."""
        rest = data[end:]
        if not end:
            lines = b""
        else:
            lines = b"".join((*self._held, data[:end]))
            self._held.clear()
            self._size = 0
        self._size += len(rest)
        # The head of a line too long is forgotten: then it is no JSON and its usage unreadable, which costs the reservation.
        if (self._size > KEPT_UNCOUNTED_BYTES or self._counted) and (
            self._size > MAX_LINE_BYTES or not self._keep(self._size)
        ):
            self._keep(0)
            self._held.clear()
            self._size = len(rest)
        if rest:
            self._held.append(rest)
        return lines

    def _read_lines(self, data: bytes) -> None:
        for line in data.splitlines():
            if _MARK in line and line.startswith(b"data:"):
                self._take(line[5:])


def _named_by(lines: bytes) -> bytes:
    """Return what the last line of an event stream calls its event: its JSON's `type`, or the data itself."""
    last = next((line for line in reversed(lines.splitlines()) if line), b"")
    data = last.removeprefix(b"data:").strip() if last.startswith(b"data:") else b""
    try:
        return _decode_type(data).type.encode()
    except (msgspec.MsgspecError, RecursionError):
        return data


class JsonUsage(UsageReader):
    """Keeps a reply that is one JSON value until it is whole, within MAX_JSON_BYTES, and reads its counts."""

    __slots__ = ("_held", "_is_unread", "_size")

    def __init__(self, kept: Kept) -> None:
        super().__init__(kept)
        self._held: list[bytes] = []
        self._size = 0
        # Whether it is, or was at some time, more than there was room for.
        self._is_unread = False

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > KEPT_UNCOUNTED_BYTES and not self._has_room():
            return
        self._held.append(data)

    def end(self) -> None:
        if not self._is_unread:
            self._take(self._held[0] if len(self._held) == 1 else b"".join(self._held))
        self.drop()

    def drop(self) -> None:
        self._held.clear()
        super().drop()

    def _has_room(self) -> bool:
        if not self._is_unread and (self._size > MAX_JSON_BYTES or not self._keep(self._size)):
            self._is_unread = True
            self.drop()
        return not self._is_unread

    def ends_with(self, markers: tuple[bytes, ...]) -> bool:
        if self._is_unread:
            return True
        try:
            _is_whole(b"".join(self._held))
        except (msgspec.MsgspecError, RecursionError):
            return False
        return True


class NoUsage(UsageReader):
    """For replies that spend nothing, and those that cannot be read."""

    __slots__ = ()

    def feed(self, data: bytes) -> None:
        pass

    def end(self) -> None:
        pass


NO_USAGE: Final = NoUsage(Kept())
