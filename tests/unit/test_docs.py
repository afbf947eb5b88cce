"""What the documents name is there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import CHECKOUT

DOCUMENTS = sorted(path for path in CHECKOUT.glob("**/*.md") if ".git" not in path.parts and "tests" not in path.parts)
# In a table of steps the program's name stands once: `gateway/net/arrival.py`, `core/head.py`.
ROOTS = (CHECKOUT, CHECKOUT / "gateway", CHECKOUT / "control")


def _links(text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            yield target


def _files(text: str) -> Iterator[str]:
    yield from re.findall(r"`([\w./*-]+/[\w.*-]+\.(?:py|toml|md|json|cfg|sh))`", text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    missing = [link for link in _links(document.read_text()) if not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_every_file_named_exists(document: Path) -> None:
    # Paths of a host (/run/…, /etc/…) are not ours to check.
    named = [name for name in _files(document.read_text()) if not name.startswith("/")]
    missing = [name for name in named if not any(list(root.glob(name)) for root in ROOTS)]
    assert missing == []
