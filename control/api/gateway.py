"""Handlers of the API that are about the gateway: what it serves, and what it would decide."""

from typing import Final

from aiohttp import web

from control.api.problems import ProblemError
from control.api.sessions import json_response, read_body
from control.api.types import EgressCheck, EgressChecked, GatewaySession, GatewayView
from control.link import GatewayLink
from control.sessions.manager import SessionManager
from control.sessions.refusals import NoSuchSessionError
from control.spec import SessionPolicy, policy_of, policy_problems
from gateway.contract.ids import is_session_id

# The gateway gives a name 5 s, and those that wait for their turn as long again.
_ANSWER_S: Final = 15.0


class GatewayHandlers:
    """Status and egress checks."""

    def __init__(self, manager: SessionManager, link: GatewayLink) -> None:
        self._manager = manager
        self._link = link

    async def status(self, _request: web.Request) -> web.Response:
        """GET /v1/gateway"""
        served = tuple(
            GatewaySession(grant.session, grant.network, grant.address or "", self._link.usage.total(grant.session))
            for grant in self._link.grants()
        )
        return json_response(GatewayView(self._link.connected, self._link.epoch, served))

    async def check(self, request: web.Request) -> web.Response:
        """POST /v1/egress/check"""
        wanted = await read_body(request, EgressCheck)
        policy = await self._policy(wanted)
        problems = policy_problems(policy)
        if problems:
            raise ProblemError(422, "invalid_policy", "the policy cannot be used", problems=tuple(problems))
        opinions = await self._link.opinions(policy.network, policy.allow, policy.deny, wanted.hosts, _ANSWER_S)
        return json_response(EgressChecked(policy, opinions))

    async def _policy(self, wanted: EgressCheck) -> SessionPolicy:
        if bool(wanted.session) == (wanted.policy is not None):
            raise ProblemError(422, "invalid_body", "give either a session or a policy")
        if wanted.policy is not None:
            return wanted.policy
        if not is_session_id(wanted.session):
            raise NoSuchSessionError(wanted.session[:64])
        return policy_of((await self._manager.get(wanted.session)).spec)
