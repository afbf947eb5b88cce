"""What people write on the command line: durations, sizes, variables."""

import enum
import os
import re
from collections.abc import Sequence
from typing import Final, TypeVar

from gateway.contract.limits import GIB, KIB, MIB
from gateway.contract.policy import NetworkLevel

_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)(ms|s|m|h|d)", re.ASCII)
_SIZE: Final = re.compile(r"(\d{1,12}(?:\.\d{1,3})?)([kmg]?)i?b?", re.ASCII | re.IGNORECASE)
_MILLISECONDS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_BYTES: Final = {"": 1, "k": KIB, "m": MIB, "g": GIB}


Choice = TypeVar("Choice", bound=enum.StrEnum)


class ParseError(Exception):
    """Not what was expected; one sentence that says what is."""


def duration_ms(option: str, text: str, least: int = 1) -> int:
    """Return a duration such as `90s` in milliseconds; 0 for an empty text. Raises ParseError, also below `least`.

    0 is what the API takes for "not given": a limit of nothing would be none.
    """
    if not text:
        return 0
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ParseError(f"{option} is a duration such as 90s, 20m or 2h, not {text!r}")
    value = round(float(found[1]) * _MILLISECONDS[found[2]])
    if value < least:
        raise ParseError(f"{option} must be above 0; leave it out for no limit of your own")
    return value


def size_bytes(option: str, text: str) -> int:
    """Return a size such as `512m` in bytes; 0 for an empty text. Raises ParseError, also for a size of 0."""
    if not text:
        return 0
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ParseError(f"{option} is a size such as 512m or 4g, not {text!r}")
    value = round(float(found[1]) * _BYTES[found[2].lower()])
    if not value:
        raise ParseError(f"{option} must be above 0; leave it out for no limit of your own")
    return value


def environment(entries: Sequence[str]) -> dict[str, str]:
    """Return `NAME=VALUE` entries as variables; a bare `NAME` is taken from this program's own. Raises ParseError."""
    variables = {}
    for entry in entries:
        name, given, value = entry.partition("=")
        if not given:
            if name not in os.environ:
                raise ParseError(f"--env {name}: there is no such variable here; write {name}=VALUE")
            value = os.environ[name]
        variables[name] = value
    return variables


def level(text: str) -> NetworkLevel:
    """Return a network level by its name. Raises ParseError."""
    try:
        return NetworkLevel(text)
    except ValueError:
        raise ParseError(f"--network is one of {', '.join(NetworkLevel)}, not {text!r}") from None


def choices(option: str, kind: type[Choice], texts: Sequence[str]) -> tuple[Choice, ...]:
    """Return what an option names that may be repeated. Raises ParseError."""
    try:
        return tuple(kind(text) for text in texts)
    except ValueError:
        raise ParseError(f"{option} is one of {', '.join(kind)}") from None
