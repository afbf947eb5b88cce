"""Grants from specs, and what earlier epochs of the gateway have used. Pure."""

import hashlib
from collections.abc import Mapping

import msgspec

from control.spec import SandboxSpec
from gateway.contract.policy import Grant, Usage


def grant_for(spec: SandboxSpec, session: str, token_sha256: str, address: str, used: Usage) -> Grant:
    """Return the whole permission of a session as its spec asks and the host assigned."""
    return Grant(
        session=session,
        token_sha256=token_sha256,
        network=spec.network,
        allow=spec.allow,
        deny=spec.deny,
        egress_budget=spec.egress_budget,
        model_budget=spec.model_budget,
        models=spec.models,
        address=address,
        used=used,
    )


def policy_digest(spec: SandboxSpec) -> str:
    """Return what tells two policies apart, for the container's label: the same policy has the same digest."""
    policy = (
        spec.network,
        sorted(spec.allow),
        sorted(spec.deny),
        spec.egress_budget,
        spec.model_budget,
        sorted(spec.models),
    )
    return hashlib.sha256(msgspec.json.encode(policy)).hexdigest()[:16]


def total(epochs: Mapping[str, Usage]) -> Usage:
    """Return what a session has used in all epochs of the gateway together."""
    return used_before(epochs, None)


def used_before(epochs: Mapping[str, Usage], present: str | None) -> Usage:
    """Return what was used in all epochs but `present`, whose count the gateway itself still has."""
    used = Usage()
    for epoch, usage in epochs.items():
        if epoch != present:
            used = used.plus(usage)
    return used


def latest(known: Usage | None, reported: Usage) -> Usage:
    """Return the larger of two cumulative reports field by field: a report that arrives late takes nothing back."""
    if known is None:
        return reported
    return Usage(*(max(getattr(known, name), getattr(reported, name)) for name in Usage.__struct_fields__))
