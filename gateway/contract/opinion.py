"""What the gateway would decide, said to an operator who asks before a session does. Only operators see it: it names addresses."""

import enum

import msgspec


class EgressStep(enum.StrEnum):
    """Where the decision fell, in the order of the gateway's own steps."""

    AUTHORITY = "authority"
    RULES = "rules"
    RESOLVE = "resolve"
    ADDRESSES = "addresses"


class JudgedAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One address of a host. `why` is the rule that lets it pass or the reason that it is refused for.

    `kind` is its class and the document that defines it, empty when it is globally reachable; `openable` whether an operator may
    open a network of this class for named hosts.
    """

    address: str
    allowed: bool
    why: str
    kind: str = ""
    openable: bool = False


class EgressOpinion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What would be decided about one host.

    `asked` is the text of the question, `host` and `port` what it was read as. `step` is the last one taken. `rule` names what
    allows the host by name; `reason` (of the audit log) and `message` say why it is refused.
    """

    asked: str
    host: str = ""
    port: int = 0
    allowed: bool = False
    step: EgressStep
    rule: str = ""
    reason: str = ""
    message: str = ""
    addresses: tuple[JudgedAddress, ...] = ()
