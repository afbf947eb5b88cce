"""Egress decisions explained: the same functions that judge a CONNECT, asked in the same order, with what each one said.

Two halves, because between them a name is resolved, and that is not done here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.contract.opinion import EgressOpinion, EgressStep, JudgedAddress
from gateway.core.address import IPAddress, address_class
from gateway.core.authority import Authority, AuthorityError, parse_authority
from gateway.core.decide import HostFacts, decide_addresses, decide_host
from gateway.core.rules import Policy
from gateway.core.verdict import Allow, Deny, DenyReason

# What somebody who names no port means: nearly everything that a session reaches is HTTPS.
DEFAULT_PORT: Final = 443


@dataclass(frozen=True, slots=True)
class Named:
    """The host is allowed by name; its addresses are yet to be judged."""

    asked: str
    authority: Authority
    rule: str


def explain_host(policy: Policy, asked: str) -> Named | EgressOpinion:
    """Judge `host` or `host:port` as far as that needs no addresses."""
    try:
        authority = parse_authority(asked.encode("utf-8", "surrogatepass"), DEFAULT_PORT)
    except AuthorityError as error:
        reason = DenyReason.MALFORMED_AUTHORITY
        return EgressOpinion(asked=asked, step=EgressStep.AUTHORITY, reason=reason, message=str(error))
    verdict = decide_host(policy, authority)
    if isinstance(verdict, Deny):
        return _opinion(Named(asked, authority, ""), EgressStep.RULES, verdict)
    return Named(asked, authority, verdict.rule)


def explain_failure(named: Named, deny: Deny) -> EgressOpinion:
    """Return the opinion on a host whose name could not be resolved."""
    return _opinion(named, EgressStep.RESOLVE, deny)


def explain_addresses(policy: Policy, named: Named, addresses: Sequence[IPAddress], facts: HostFacts) -> EgressOpinion:
    """Judge all addresses of a host, as one and each by itself."""
    authority = named.authority
    verdict = decide_addresses(policy, authority, addresses, facts)
    judged = []
    for address in addresses:
        alone = decide_addresses(policy, authority, (address,), facts)
        found = address_class(address)
        judged.append(
            JudgedAddress(
                str(address),
                isinstance(alone, Allow),
                alone.rule if isinstance(alone, Allow) else alone.reason,
                "" if found is None else f"{found.name} ({found.source})",
                found is not None and found.openable,
            )
        )
    return _opinion(named, EgressStep.ADDRESSES, verdict, tuple(judged))


def _opinion(
    named: Named, step: EgressStep, verdict: Allow | Deny, addresses: tuple[JudgedAddress, ...] = ()
) -> EgressOpinion:
    denied = verdict if isinstance(verdict, Deny) else None
    return EgressOpinion(
        asked=named.asked,
        host=named.authority.host,
        port=named.authority.port,
        allowed=denied is None,
        step=step,
        rule=named.rule,
        reason="" if denied is None else denied.reason,
        message="" if denied is None else denied.message,
        addresses=addresses,
    )
