"""A small coverage-guided fuzzer: mutate an input, keep what reaches a new line, report what fails."""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from tests.fuzz.targets import TARGETS, Target

CORPUS: Final = Path(__file__).with_name("corpus")
MAX_INPUT_BYTES: Final = 4096

_OURS: Final = ("/gateway/", "/control/")

# Pieces that mean something to one of the parsers.
_WORDS: Final = (
    *(b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b"\t", b":", b"\x00", b"\x7f", b"\xff", b"HTTP/1.1", b"HTTP/1.0"),
    *(b"Host: a\r\n", b"Content-Length: 5\r\n", b"Content-Length: +5\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b".", b"..", b"[", b"]", b"@", b"%", b"/", b"#", b"-", b"_", b"0x", b"127.1", b":443", b":0", b":65536", b"xn--"),
    *("ü".encode(), "．".encode(), "。".encode(), "１".encode(), "\u00ad".encode(), "\u200d".encode(), b"\xed\xa0\x80"),
    *(b"::", b"::ffff:", b"64:ff9b::", b"http://", b"a" * 64, b"a." * 40),
    *(b"\r\n\r\n\x00\r\nQUIT\n", b"\x21\x11\x00\x0c", b"\x21\x21\x00\x24", b"\x20\x00\x00\x00"),
    *(
        b"0\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"x-api-key: t\r\n",
        b"expect: 100-continue\r\n",
    ),
    *(
        b'"model"',
        b'"MODEL"',
        b'"max_tokens":',
        b'"usage"',
        b'"seq":',
        b'"type":',
        b"null",
        b"-1",
        b"1e999",
        b"[" * 200,
        b"{" * 200,
    ),
    *(
        b"\ndata: ",
        b"\n\n",
        b"ustar\x00",
        b"../",
        b"/",
        b"\x01\x00\x00\x00\x00\x00\x00\x05",
        b"\x84",
        b"\xdf\xff\xff\xff\xff",
    ),
    # Deeper than a reader can call itself.
    *(b"[" * 1_500, b'{"":' * 1_100, b"\x91" * 1_500),
    *(
        b"\x1b]0;",
        b"\r",
        "\u202e".encode(),
        "\u2028".encode(),
        "²".encode(),
        b"\\u001b",
        b"\\ud800",
        b"\xfe\xfe",
        b"sk-sk-",
    ),
    *(
        b"size=",
        b"11 size=99\n",
        b"SCHILY.xattr.",
        b"-1000",
        b"0o17",
        b"[[registry]]\n",
        b"Bearer ",
        b"Basic ",
        b"true",
    ),
    *(b"\x16\x03\x01", b"\x16\x03\x03\x00\x01", b"\x01\x00\x00", b"\x00\x00", b"\x00\x10", b"\xfe\x0d", b"\x40\x00"),
)


@dataclass(frozen=True)
class Failure:
    """An input that a target failed on."""

    data: bytes
    error: BaseException


def seeds(name: str) -> list[bytes]:
    """Return the committed inputs of a target."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def mutate(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Return `data` with one to four changes: bits, words, numbers, pieces moved, dropped, doubled or from another."""
    mutated = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randint(0, len(mutated))
        end = min(len(mutated), place + rng.choice((1, 2, 4, 8, 32)))
        match rng.randrange(8):
            case 0 if place < len(mutated):
                mutated[place] ^= 1 << rng.randrange(8)
            case 1 if place < len(mutated):
                mutated[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                mutated[place:place] = rng.choice(_WORDS)
            case 3:
                mutated[place:end] = rng.choice(_WORDS)
            case 4:
                del mutated[place:end]
            case 5:
                mutated[place:place] = mutated[place:end] * rng.choice((1, 2, 40))
            case 6:
                other = rng.choice(others)
                mutated[place:] = other[rng.randint(0, len(other)) :]
            case 7:
                # A length that no longer fits is what breaks parsers.
                mutated[place:end] = rng.choice((0, 1, end, 255, 16384, 65535)).to_bytes(2, "big")
    return bytes(mutated[:MAX_INPUT_BYTES])


def _run_traced(target: Target, data: bytes, reached: set[tuple[str, int]]) -> None:
    """Run `target` and add the lines of the gateway's and control's own code that it reaches."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and not any(part in frame.f_code.co_filename for part in _OURS):
            return None
        if event == "line":
            reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        target(data)
    finally:
        sys.settrace(before)


def fuzz(name: str, seed: int) -> Iterator[Failure | None]:
    """Run the target `name` on one mutated input after another, for as long as the caller asks; None: it held.

    The inputs depend on `seed` and the corpus alone.
    """
    target = TARGETS[name]
    rng = random.Random(seed)
    pool = seeds(name)
    reached: set[tuple[str, int]] = set()
    for data in pool:
        _run_traced(target, data, reached)
    while True:
        data = mutate(rng.choice(pool), pool, rng)
        known = len(reached)
        try:
            _run_traced(target, data, reached)
        except Exception as error:
            yield Failure(data, error)
            continue
        if len(reached) > known:
            pool.append(data)
        yield None
