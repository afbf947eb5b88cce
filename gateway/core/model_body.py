"""What a rule must know of a model request's JSON body: the model, whether it streams, the most it may cost.

Read only when a session's grant asks for it. Two readers that take different values out of one body are a way around the
rule between them, so a key that is there twice, or in another case (Go's decoder ignores case), is refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Final

import msgspec

from gateway.core.model_refusal import ModelRefusal
from gateway.core.providers import BodyRule
from gateway.core.usage import MAX_TOKENS
from gateway.core.verdict import DenyReason

_MAX_CHOICES: Final = 128
# Providers know some thirty. A body of the largest size could hold millions: ten seconds of the loop, a gigabyte of memory.
_MAX_KEYS: Final = 256


class _Key:
    """A key that equals no other, so that a dictionary keeps every pair of the object."""

    __slots__ = ()


class _Pairs:
    """Decodes one object after the other as its pairs, of which each has at most _MAX_KEYS."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._decode = msgspec.json.Decoder(dict[_Key, msgspec.Raw], dec_hook=self._make_key).decode

    def _make_key(self, _kind: type, name: Any) -> _Key:
        names = self._names
        names.append(name)
        if len(names) > _MAX_KEYS:
            raise _BodyError("it has too many keys")
        return _Key()

    def of(self, body: bytes | msgspec.Raw) -> Iterable[tuple[str, msgspec.Raw]]:
        """Return the pairs. Raises _BodyError, and msgspec's errors."""
        names = self._names = []
        return zip(names, self._decode(body).values(), strict=True)


# Stands for a value whose key is spelled in another case.
_ODD: Final = msgspec.Raw(b"")


class BodyFacts(msgspec.Struct, frozen=True):
    """What was read. `output_tokens` is the most the reply may have, None when the request does not say."""

    model: str
    output_tokens: int | None


class _BodyError(Exception):
    """The body is not what the provider's API takes; the message says what."""


_pairs: Final = _Pairs()
# Made once: making one costs more than all the rest of a body of usual size.
_decoders: Final[Mapping[type, Callable[[msgspec.Raw], Any]]] = MappingProxyType(
    {kind: msgspec.json.Decoder(kind | None, strict=True).decode for kind in (str, bool, int)}
)


def read_body(body: bytes, rule: BodyRule, models: Sequence[str], *, limits_tokens: bool) -> BodyFacts | ModelRefusal:
    """Read a request's body and hold it against the allowed `models` (shell patterns; none: any)."""
    try:
        fields = _read_object(body)
        model = _read(fields, "model", str)
        if not model:
            raise _BodyError("`model` is missing")
        if models and not any(fnmatchcase(model, pattern) for pattern in models):
            return ModelRefusal(DenyReason.MODEL_NOT_ALLOWED, "This session may not use the model that was asked for")
        if not limits_tokens:
            return BodyFacts(model, None)
        for name in rule.refused:
            if _read(fields, name, bool):
                raise _BodyError(f"`{name}` cannot be used under a token budget")
        if rule.usage_option and _read(fields, "stream", bool) and not _includes_usage(fields):
            raise _BodyError("a stream under a token budget needs `stream_options.include_usage`")
        return BodyFacts(model, _output_tokens(fields, rule))
    except _BodyError as error:
        return ModelRefusal(DenyReason.MALFORMED_REQUEST, f"The request body cannot be accepted: {error}")


def _read_object(body: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    try:
        pairs = _pairs.of(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _BodyError("it is not a JSON object") from error
    fields: dict[str, msgspec.Raw] = {}
    for spelled, value in pairs:
        name = spelled.casefold()
        if name in fields:
            raise _BodyError("a key is there twice")
        fields[name] = value if name == spelled else _ODD
    return fields


def _read(fields: dict[str, msgspec.Raw], name: str, kind: type) -> Any:
    """Return the field as a `kind`, None when it is not there or null."""
    raw = fields.get(name)
    if raw is None:
        return None
    if raw is _ODD:
        raise _BodyError(f"`{name}` is spelled in another case")
    try:
        return _decoders[kind](raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _BodyError(f"`{name}` has the wrong type") from error


def _includes_usage(fields: dict[str, msgspec.Raw]) -> bool:
    options = fields.get("stream_options")
    if options is None or options is _ODD:
        return False
    return _read(_read_object(options), "include_usage", bool) is True


def _output_tokens(fields: dict[str, msgspec.Raw], rule: BodyRule) -> int | None:
    caps: list[int] = []
    for name in rule.output_caps:
        cap = _read(fields, name, int)
        if cap is not None:
            caps.append(cap)
    if not caps:
        return None
    choices: int | None = _read(fields, rule.choices, int) if rule.choices else None
    # With two caps given the provider takes one of them; which one is not ours to guess.
    most, times = max(caps), 1 if choices is None else choices
    if not min(caps) >= 0 or most > MAX_TOKENS or not 0 < times <= _MAX_CHOICES:
        raise _BodyError("a limit of tokens or choices is out of range")
    return most * times
