"""Answers what would be decided about hosts: resolves as a CONNECT does, dials nothing."""

import asyncio
from typing import Final

from gateway.contract.messages import EgressAnswer, EgressQuestion
from gateway.contract.opinion import EgressOpinion
from gateway.core.explain import Named, explain_addresses, explain_failure, explain_host
from gateway.core.rules import Policy, RegistryList, RuleErrors
from gateway.core.verdict import Deny
from gateway.net.resolve import ResolveError
from gateway.net.services import Services

# Questions that are answered at once; more wait. Each resolves its names at most as wide as one session may.
MAX_QUESTIONS: Final = 4
# No session id is empty, so no session's names wait for an operator's.
_NOBODY: Final = ""


class Adviser:
    """Answers questions from the policy they carry and from what is in force in this gateway."""

    def __init__(self, services: Services, registries: RegistryList) -> None:
        self._services = services
        self._registries = registries
        self._gate = asyncio.Semaphore(MAX_QUESTIONS)

    async def answer(self, question: EgressQuestion) -> EgressAnswer:
        """Return an opinion on each host, or what is wrong with the policy."""
        try:
            policy = Policy.compile(question.network, question.allow, question.deny, self._registries)
        except RuleErrors as error:
            return EgressAnswer(question.serial, problems=error.problems)
        async with self._gate:
            opinions = await asyncio.gather(*(self._opinion(policy, host) for host in question.hosts))
        return EgressAnswer(question.serial, opinions=tuple(opinions))

    async def _opinion(self, policy: Policy, asked: str) -> EgressOpinion:
        named = explain_host(policy, asked)
        if not isinstance(named, Named):
            return named
        if named.authority.address is not None:
            return explain_addresses(policy, named, (named.authority.address,), self._services.facts)
        answer = await self._services.resolver.look_up(named.authority.host, _NOBODY)
        if isinstance(answer, ResolveError):
            return explain_failure(named, Deny(answer.reason, answer.message))
        return explain_addresses(policy, named, answer.addresses, self._services.facts)
