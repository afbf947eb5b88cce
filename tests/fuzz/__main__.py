"""Fuzz for a while: `python -m tests.fuzz [--seconds N] [--seed N] [target …]`. Failing inputs are printed and kept."""

import argparse
import hashlib
import random
import sys
import time
import traceback
from pathlib import Path

from tests.fuzz.fuzzer import fuzz
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Run every target for its share of the time; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="target", help=f"of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=60, help="for each target (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="for the same inputs again (default: a new one)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="folder for failing inputs")
    options = parser.parse_args()
    for name in options.targets:
        if name not in TARGETS:
            parser.error(f"no target {name!r}; there are {', '.join(TARGETS)}")
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    failed = False
    for name in options.targets or TARGETS:
        runs = 0
        end = time.monotonic() + options.seconds
        for failure in fuzz(name, seed):
            runs += 1
            if failure is not None:
                failed = True
                options.keep.mkdir(exist_ok=True)
                kept = options.keep / f"{name}-{hashlib.sha256(failure.data).hexdigest()[:16]}"
                kept.write_bytes(failure.data)
                traceback.print_exception(failure.error)
                print(f"{name}: failed on {failure.data!r}, kept as {kept}")
                break
            if time.monotonic() >= end:
                break
        print(f"{name}: {runs} runs, seed {seed}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
