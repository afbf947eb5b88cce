"""What a session may do, as control grants it and the gateway enforces it. A grant is whole: it replaces the one before."""

import enum
from typing import Annotated, Final

import msgspec

# The largest whole number that JSON carries everywhere (RFC 8259 §6).
MAX_NUMBER: Final = 2**53


class NetworkLevel(enum.StrEnum):
    """How much of the network a session may reach through CONNECT and plain HTTP."""

    NONE = "none"
    REGISTRIES = "registries"
    OPEN = "open"


class EgressBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Egress of one session. `bytes` counts both directions, 0 means no limit; `connections` at once."""

    bytes: int = 0
    connections: int = 64


class ModelBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Model use of one session; 0 means no limit."""

    requests_per_minute: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


def budget_problems(egress: EgressBudget, model: ModelBudget) -> list[str]:
    """Return every problem of a session's budgets, each a sentence that begins with the field."""
    problems = [
        f"{name}.{field}: must be between 0 and 2^53"
        for name, budget in (("egress_budget", egress), ("model_budget", model))
        for field in budget.__struct_fields__
        if not 0 <= getattr(budget, field) <= MAX_NUMBER
    ]
    if egress.connections == 0:
        problems.append("egress_budget.connections: must be at least 1; use network = none for no connections")
    return problems


# Of what was used; of a message with another it is none of the contract.
Count = Annotated[int, msgspec.Meta(ge=0)]
# The most that a message can say (msgpack). Whoever adds up what several said may not come to more.
_MAX_COUNT: Final = (1 << 64) - 1


class Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a session has used. Cumulative, never a difference, so that a message repeated or lost changes nothing.

    Never negative where it is read: that would fill a budget up again.
    """

    egress_bytes_up: Count = 0
    egress_bytes_down: Count = 0
    egress_allowed: Count = 0
    egress_refused: Count = 0
    model_requests: Count = 0
    input_tokens: Count = 0
    output_tokens: Count = 0
    cache_read_tokens: Count = 0
    cache_write_tokens: Count = 0

    @property
    def egress_bytes(self) -> int:
        """Bytes in both directions, as a budget counts them."""
        return self.egress_bytes_up + self.egress_bytes_down

    def plus(self, other: "Usage") -> "Usage":
        """Add two usages field by field."""
        return Usage(*(min(getattr(self, name) + getattr(other, name), _MAX_COUNT) for name in self.__struct_fields__))

    def minus(self, other: "Usage") -> "Usage":
        """Subtract an earlier usage of the same epoch."""
        return Usage(*(getattr(self, name) - getattr(other, name) for name in self.__struct_fields__))


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One session's whole permission.

    `address` is the sandbox's own, without which no caller is accepted on a port that requires PROXY headers.
    `used` is what was used in all earlier epochs of the gateway (see `messages`), so no restart refills a budget.
    """

    session: str
    token_sha256: str
    network: NetworkLevel = NetworkLevel.NONE
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    egress_budget: EgressBudget = EgressBudget()
    model_budget: ModelBudget = ModelBudget()
    models: tuple[str, ...] = ()
    address: str | None = None
    used: Usage = Usage()
