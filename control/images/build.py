"""Build an image's root file system with mmdebstrap: from a Debian mirror, without an image registry. Runs as root."""

import hashlib
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from control.images.recipes import SUITE, Download, Recipe

# Time stamps of everything in an image, so that the same packages give the same bytes: 1 January 2025.
_EPOCH: Final = "1735689600"
_MAX_DOWNLOAD_BYTES: Final = 64 * 1024 * 1024
# A site's way to its mirror, which the build must go and the image must not know.
_APT_NETWORK: Final = ("Acquire::http::Proxy", "Acquire::https::Proxy", "Acquire::https::CaInfo")


class BuildError(Exception):
    """An image could not be built. The message is for people and ends with what to do."""


def tarball(recipe: Recipe, cache: Path, mirrors: Sequence[str] = ()) -> Path:
    """Return where the recipe's tarball lies in `cache`, whether built or not."""
    return cache / f"{recipe.label(mirrors)}.tar"


def build(recipe: Recipe, cache: Path, mirrors: Sequence[str] = (), *, force: bool = False) -> Path:
    """Build the recipe's root file system as a tarball in `cache` and return its path; at once if it is there.

    `mirrors` are mmdebstrap's MIRROR arguments (URIs, sources.list lines or files); by default Debian's own with its
    security archive. Raises BuildError.
    """
    done = tarball(recipe, cache, mirrors)
    if done.exists() and not force:
        return done
    if os.geteuid() != 0:
        raise BuildError("building images needs root: its files belong to several users. Run it as root.")
    if shutil.which("mmdebstrap") is None:
        raise BuildError("mmdebstrap is not installed. Run: apt-get install mmdebstrap")
    cache.mkdir(parents=True, exist_ok=True)
    for download in recipe.downloads:
        _fetch(download, cache)
    with tempfile.TemporaryDirectory(prefix=f".{recipe.name}-", dir=cache) as scratch:
        partial = Path(scratch) / "root.tar"
        with (Path(scratch) / "log").open("w+b") as log:
            outcome = subprocess.run(  # noqa: S603 - argv from our recipe and the operator's mirrors
                _command(recipe, Path(scratch), cache, partial, mirrors),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "SOURCE_DATE_EPOCH": _EPOCH, "LC_ALL": "C"},
                check=False,
            )
            if outcome.returncode:
                log.seek(0)
                tail = log.read().decode(errors="replace").splitlines()[-15:]
                raise BuildError(
                    f"mmdebstrap could not build the {recipe.name} image (status {outcome.returncode}). Check that this "
                    "machine reaches a Debian mirror, or name one with --mirror. Its last lines:\n" + "\n".join(tail)
                )
        partial.rename(done)
    for older in cache.glob(f"{recipe.name}-????????????????.tar"):
        if older != done:
            older.unlink()
    return done


def _fetch(download: Download, cache: Path) -> None:
    """Put a download into `cache` if it is not there. Raises BuildError."""
    file = cache / download.name
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        by_hand = f"Fetch it by other means, put it at {file}, and build again."
        try:
            with urllib.request.urlopen(download.url, timeout=60) as reply:  # noqa: S310 - a recipe's own URL
                content = reply.read(_MAX_DOWNLOAD_BYTES)
        except (urllib.error.URLError, OSError) as error:
            raise BuildError(f"{download.url} could not be fetched: {error}. {by_hand}") from error
    if hashlib.sha512(content).hexdigest() != download.sha512:
        file.unlink(missing_ok=True)
        raise BuildError(f"{download.name} is not what the recipe names: its SHA-512 differs. Fetch it again.")
    file.write_bytes(content)


def _command(recipe: Recipe, scratch: Path, cache: Path, target: Path, mirrors: Sequence[str]) -> list[str]:
    for name in recipe.files:
        # Copied out first: in a zipped installation it is no file of its own.
        (scratch / name).write_bytes(recipe.source(name).read_bytes())
    return [
        "mmdebstrap",
        "--mode=root",
        "--format=tar",
        *recipe.options(str(scratch), str(cache)),
        *(f"--aptopt={line}" for line in _apt_network()),
        SUITE,
        str(target),
        *mirrors,
    ]


def _apt_network() -> list[str]:
    if (apt_config := shutil.which("apt-config")) is None:
        return []
    dump = subprocess.run(  # noqa: S603 - fixed arguments
        [apt_config, "dump", "--no-empty", "--format", '%f "%v";%n', *_APT_NETWORK],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return dump.stdout.splitlines() if dump.returncode == 0 else []
