"""A short fuzz of every target; `OPIFICIA_FUZZ_RUNS` makes it a long one. A failure prints the input."""

import contextlib
import itertools
import os
import random

import pytest

from gateway.core.parked import ParkedError, decode_parked
from tests.fuzz.fuzzer import fuzz, mutate, seeds
from tests.fuzz.handover_targets import parked_record
from tests.fuzz.targets import TARGETS

RUNS = int(os.environ.get("OPIFICIA_FUZZ_RUNS", "3000"))
# These write files, run a loop or read by others' parsers: one run of theirs takes as long as so many of another.
COSTS = {
    "alignment": 6,
    "contract": 6,
    "grants": 2,
    "answer": 5,
    "archive": 20,
    "dns_answer": 12,
    "journal": 4,
    "listing": 2,
    "log_index": 8,
    "model_key": 4,
    "out_archive": 30,
    "parcel": 2,
    "probe_words": 2,
    "redacted_reply": 3,
    "registries": 3,
    "shown_stream": 15,
    "settings": 3,
    "spec": 2,
    "terminal": 3,
    "usage_reports": 2,
}


@pytest.mark.parametrize("name", TARGETS)
def test_the_target_holds_for_its_corpus(name: str) -> None:
    assert len(seeds(name)) >= 5
    for data in seeds(name):
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_the_target_holds_for_what_mutation_makes_of_its_corpus(name: str) -> None:
    for failure in itertools.islice(fuzz(name, seed=1), RUNS // COSTS.get(name, 1)):
        if failure is not None:
            pytest.fail(f"{name} failed on {failure.data!r}: {failure.error!r}")


def test_the_fuzzer_finds_a_fault_that_takes_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(data: bytes) -> None:
        assert not (b"\x16\x03\x01" in data and b"xn--" in data)

    monkeypatch.setitem(TARGETS, "head", faulty)
    assert any(failure is not None for failure in itertools.islice(fuzz("head", seed=1), 20_000))


def test_the_same_seed_makes_the_same_inputs() -> None:
    def inputs() -> list[bytes]:
        rng = random.Random(7)
        return [mutate(b"GET / HTTP/1.1\r\n\r\n", [b"other"], rng) for _ in range(100)]

    assert inputs() == inputs()


def test_the_seeds_of_a_parked_record_are_of_its_present_form() -> None:
    # Else a change of the form would leave the fuzzer with nothing that gets past its first check.
    read = 0
    for data in seeds("parked"):
        with contextlib.suppress(ParkedError):
            decode_parked(parked_record(data[1:]), data[0])
            read += 1
    assert read >= 8
