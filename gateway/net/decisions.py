"""Remembers CONNECT requests that passed, so that the same bytes need not be parsed and judged again.

A client asks for the same few hosts in the same words, a package manager hundreds of times a minute. This is a memory, no
policy: an entry counts only while all it was decided from (session, grant, resolved answer, facts about this host) are the
very same objects, and every count, budget and deadline is taken anew. It is found by SHA-256, so that no token is kept, and
how long a look-up takes tells nothing about one.
"""

from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from gateway.contract.policy import Grant
from gateway.core.authority import Authority
from gateway.core.decide import HostFacts
from gateway.registry import IPAddress, Registry, Session

# Heads remembered, under 1 KiB each with what they were decided from. Once full, all are forgotten and learned again.
MAX_DECISIONS: Final = 1024

_METHOD: Final = b"CONNECT "
_END: Final = b"\r\n\r\n"


@dataclass(slots=True)
class Decision:
    """A request that passed: what it asks for, in whose name, by which rule, and the addresses that were judged."""

    authority: Authority
    session: Session
    grant: Grant
    rule: str
    addresses: tuple[IPAddress, ...]
    facts: HostFacts


def key_of_connect(data: bytes, max_bytes: int) -> tuple[bytes, int] | None:
    """Return the key and size of the CONNECT head at the start of `data`; None when there is no whole one."""
    if not data.startswith(_METHOD):
        return None
    size = data.find(_END, 0, max_bytes) + len(_END)
    return (sha256(data[:size]).digest(), size) if size >= len(_END) else None


class Decisions:
    """The memory of one gateway."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._known: dict[bytes, Decision] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: bytes) -> Decision | None:
        """Return what was decided about a head, while its session lives with the same grant."""
        decision = self._known.get(key)
        if decision is None:
            return None
        session = decision.session
        if self._registry.get(session.id) is session and session.grant is decision.grant:
            return decision
        del self._known[key]
        return None

    def remember(self, key: bytes, decision: Decision) -> None:
        """Keep a decision."""
        if len(self._known) >= MAX_DECISIONS:
            self._known.clear()
        self._known[key] = decision
