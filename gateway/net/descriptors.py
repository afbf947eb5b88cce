"""Keeps some file descriptors free, so that running out of them refuses newcomers and harms nobody else.

The kernel gives out the lowest free number, so a number near the limit says that nearly all are in use.
"""

import resource
from dataclasses import dataclass
from typing import Final

# Kept for name look-ups, audit files, control and a last few refusals.
_INNER: Final = 256
# Kept in addition for the upstream sides of connections that were let in already.
_UPSTREAM: Final = 512


@dataclass(frozen=True, slots=True)
class DescriptorBudget:
    """Below which number a new client's descriptor, and an upstream's, may lie."""

    client_below: int
    upstream_below: int

    @classmethod
    def of_limit(cls, limit: int) -> "DescriptorBudget":
        """Share out a limit of open files; a small one in proportion."""
        inner = min(_INNER, limit // 8)
        return cls(limit - inner - min(_UPSTREAM, limit // 4), limit - inner)


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one; a tunnel takes two. Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
