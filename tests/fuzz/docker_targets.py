"""Targets on the engine's side of control: /out as a tar, the record of an output, events, answers, listings of the host."""

import contextlib
import io
import json
import tarfile

from control.docker.alignment import ENTRY_BYTES, Alignment, _recorded
from control.docker.archive import TarCut
from control.docker.events import _parsed
from control.docker.helper import Executed, _answer
from control.docker.images import _last_word
from control.docker.types import EngineError, OutLimits, OutSummary
from control.plan import firewall, routes
from control.plan.network import NetworkSettings
from tests.fuzz.properties import check_bounded, pieces

_LIMITS = OutLimits(bytes=3 * 1024, entries=4)
_NETWORK = NetworkSettings()
# What the rules look like where they are in force.
_LISTED = [
    *(
        {"chain": {"family": family, "table": _NETWORK.bridge, "name": chain, "type": "filter", "hook": chain, "prio": priority, "policy": "accept"}}
        for family, chain, priority in firewall._CHAINS
    ),
    *(
        {"rule": {"family": family, "table": _NETWORK.bridge, "chain": chain, "handle": 7, "expr": expressions}}
        for family, chain, expressions in firewall.rules(_NETWORK).values()
    ),
]  # fmt: skip
LISTING = json.dumps({"nftables": [{"metainfo": {"version": "1.0.6"}}, *_LISTED]}).encode()


def out_archive(data: bytes) -> None:
    """`TarCut`: a whole tar within its bounds, the beginning of what came, the same however it came."""

    def cut(parts: list[bytes]) -> tuple[bytes, OutSummary] | str:
        tar, written = TarCut(_LIMITS), b""
        try:
            for part in parts:
                written += tar.feed(part)
            end, summary = tar.end()
        except EngineError as error:
            check_bounded(str(error), b"")
            return "refused"
        assert data.startswith(written)
        return written + end, summary

    whole = cut([data])
    assert cut(pieces(data, 250)) == whole
    if isinstance(whole, str):
        return
    written, summary = whole
    assert summary.bytes == len(written) <= max(_LIMITS.bytes, 1024)
    assert summary.entries <= _LIMITS.entries
    assert len(written) % 512 == 0
    # Sparse files by pax are no invention of ours, and not of the engine's either.
    if b"GNU.sparse" not in data:
        with (
            contextlib.suppress(tarfile.TarError, ValueError),
            tarfile.open(fileobj=io.BytesIO(written), mode="r:") as read,
        ):
            members = read.getmembers()
            assert len(members) == summary.entries
            # And it ends for them where it ends.
            last = members[-1] if members else tarfile.TarInfo()
            content = -(-last.size // 512) * 512 if last.isreg() else 0
            assert not members or last.offset_data + content == len(written) - 1024


def _record(output: bytes) -> list[bytes]:
    """Return the entries that the engine makes of an output (daemon/logger/copier.go of Docker 20.10)."""
    entries = []
    while output:
        line = output[: (output.find(b"\n", 0, ENTRY_BYTES) + 1) or ENTRY_BYTES]
        entries.append(_recorded(line))
        output = output[len(line) :]
    return entries


def _align(kept: bytes, record: list[bytes], later: list[bytes]) -> tuple[bytes, bool]:
    """Return what of a record is taken for new, and whether something may be missing before it."""
    found = Alignment(lambda offset, length: kept[offset : offset + length], len(kept))
    for entry in record:
        found.feed(entry)
    position, broken, whole = found.position, found.broken, b"".join(record)
    assert 0 <= position <= len(whole)
    fresh = [found.fresh(entry) for entry in later]
    # Nothing is invented.
    assert all(entry.endswith(piece) for entry, piece in zip(later, fresh, strict=True))
    return whole[position:] + b"".join(fresh), broken


def alignment(data: bytes) -> None:
    """`Alignment`: what is kept and what is new of the record make the output whole, with nothing twice.

    The first byte says how much of the output is kept, the second how much of the record is there when that is looked for.
    """
    shares, output = data[:2].ljust(2, b"\x80"), data[2:]
    cut = len(output) * shares[0] // 255
    record, kept = _record(output), output[:cut]
    if _recorded(kept) + _recorded(output[cut:]) == b"".join(record):
        # The cut is not within what the engine replaces. (A byte that could begin a U+FFFD is made one.)
        new, broken = _align(kept, record, [])
        assert (_recorded(kept + new), broken) == (b"".join(record), False)
        # Nor is it when only the lines that are kept whole were recorded by the time that it was looked for.
        whole = kept.count(b"\n")
        new, broken = _align(kept, record[:whole], record[whole:])
        assert (_recorded(kept + new), broken) == (b"".join(record), False)
    # A record of another output, that goes on with this one.
    there = len(record) * shares[1] // 255
    _align(kept, record[::-1][:there], record)
    _align(kept, record[:there], record[there:])


def engine_words(data: bytes) -> None:
    """`_parsed`, `_last_word`, `_answer`: an event, a word, a command's end as the engine told them, or none."""
    event, container, since = _parsed(data)
    seconds, _, nanoseconds = since.partition(".")
    assert not since or (seconds.lstrip("-").isdigit() and len(nanoseconds) == 9)
    assert (event, container) == ("", "") if not since else True
    try:
        said = _last_word(data)
    except EngineError:
        pass
    else:
        assert said == said.strip()
        assert len(said) <= 6 * len(data)
    try:
        ended = _answer(data)
    except EngineError as error:
        check_bounded(str(error), b"")
    else:
        assert isinstance(ended, Executed)
        assert len(ended.stdout) + len(ended.stderr) <= len(data)


def listing(data: bytes) -> None:
    """`firewall.problems`, `routes.problems`: only what is exactly as planned is well, and a problem is a sentence."""
    text = data.decode("utf-8", "replace")
    # The rules as they are when they are in force, and what the input makes of them.
    with contextlib.suppress(ValueError, RecursionError):
        entries = json.loads(text)
        for at, change in enumerate(entries if isinstance(entries, list) else ()):
            changed = [*_LISTED[:at], change, *_LISTED[at + 1 :]]
            if change is not None and at < len(_LISTED):
                found = firewall.problems(json.dumps({"nftables": changed}), _NETWORK)
                assert found or change == _LISTED[at] or _is_more_than(change, _LISTED[at])
    for problem in firewall.problems(text, _NETWORK):
        check_bounded(problem, data)
    for problem in routes.problems(text, _NETWORK):
        check_bounded(problem, data)


def _is_more_than(found: object, wanted: object) -> bool:
    """Tell whether a listing says all that is wanted, and perhaps more (handles, counters) that changes nothing."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return all(name in found and _is_more_than(found[name], wanted[name]) for name in wanted if name != "handle")
    return found == wanted


DOCKER_TARGETS = {
    "out_archive": out_archive,
    "alignment": alignment,
    "engine_words": engine_words,
    "listing": listing,
}
