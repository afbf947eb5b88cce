"""Messages on the contract socket. Version 1.

Control connects. The gateway says `Welcome` with its epoch (a new one for every gateway process). Control answers with
`Snapshot`: the whole picture; sessions that it does not name are revoked. From then on control sends `PutGrant` and
`RevokeGrant`; the gateway acknowledges each by its `serial` when it is in force, or says why not. The gateway sends
`UsageReport`s. Usage is cumulative within an epoch: control adds up the last report of each epoch, and sends the sum of
all epochs but the gateway's present one as `Grant.used`. `EgressQuestion` asks what would be decided; its answer comes
when the names are resolved, after whatever was acknowledged meanwhile.
"""

from typing import Final

import msgspec

from gateway.contract.opinion import EgressOpinion
from gateway.contract.policy import Grant, NetworkLevel, Usage

PROTOCOL_VERSION: Final = 1


class Welcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """Gateway → control, first."""

    version: int
    epoch: str


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot", forbid_unknown_fields=True):
    """Control → gateway, first: every live session's grant."""

    version: int
    serial: int
    grants: tuple[Grant, ...]


class PutGrant(msgspec.Struct, frozen=True, tag="put_grant", forbid_unknown_fields=True):
    """Control → gateway: this is now the session's whole grant."""

    serial: int
    grant: Grant


class RevokeGrant(msgspec.Struct, frozen=True, tag="revoke_grant", forbid_unknown_fields=True):
    """Control → gateway: the session is over; its tunnels close at once."""

    serial: int
    session: str


class Ack(msgspec.Struct, frozen=True, tag="ack", forbid_unknown_fields=True):
    """Gateway → control: the message with this serial is in force, or (`problem` not empty) refused, one sentence each."""

    serial: int
    problems: tuple[str, ...] = ()


class UsageReport(msgspec.Struct, frozen=True, tag="usage", forbid_unknown_fields=True):
    """Gateway → control: what a session has used in this epoch; after its revocation once more with `final`."""

    epoch: str
    session: str
    usage: Usage
    final: bool = False


class EgressQuestion(msgspec.Struct, frozen=True, tag="egress_question", forbid_unknown_fields=True):
    """Control → gateway: what would be decided about these hosts (`host` or `host:port`) under this policy?"""

    serial: int
    network: NetworkLevel
    allow: tuple[str, ...]
    deny: tuple[str, ...]
    hosts: tuple[str, ...]


class EgressAnswer(msgspec.Struct, frozen=True, tag="egress_answer", forbid_unknown_fields=True):
    """Gateway → control: an opinion on each host in the order of the question, or what is wrong with the policy."""

    serial: int
    opinions: tuple[EgressOpinion, ...] = ()
    problems: tuple[str, ...] = ()


FromControl = Snapshot | PutGrant | RevokeGrant | EgressQuestion
FromGateway = Welcome | Ack | UsageReport | EgressAnswer
