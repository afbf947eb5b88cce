"""Resolves names, once, for the judge: dnspython, cached by TTL within bounds, one query a name however many wait.

Answers are hostile input: their number, their chain of aliases and their time are bounded, and any doubt is a failure.
"""

import asyncio
import ipaddress
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.rdatatype
import dns.resolver

from gateway.core.verdict import DenyReason

log = logging.getLogger("gateway.resolve")

IPAddress = IPv4Address | IPv6Address

# More addresses than any honest service gives to one name; an answer with more is refused, not cut.
MAX_ADDRESSES: Final = 64
# How long a failure is believed (RFC 2308 §7.1 allows up to five minutes for a server failure).
FAILURE_TTL_S: Final = 5.0
# One try of one server; the deadline of the whole look-up is the caller's.
TRY_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Resolved:
    """The addresses of a name, in the order of the answer; never empty."""

    addresses: tuple[IPAddress, ...]


@dataclass(frozen=True, slots=True)
class ResolveError:
    """The name has no addresses that could be trusted. `message` is one sentence."""

    reason: DenyReason
    message: str


Answer = Resolved | ResolveError
Waiter = Callable[[Answer], None]


class _Query:
    """One name being asked for, and who waits."""

    __slots__ = ("name", "session", "task", "waiters")

    def __init__(self, name: str, session: str) -> None:
        self.name = name
        self.session = session
        self.waiters: list[Waiter] = []
        self.task: asyncio.Task[None] | None = None


class Resolver:
    """Asks the host's nameservers, or `nameservers` when given as (address, port)."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        timeout_s: float,
        cache_names: int,
        min_ttl_s: float,
        max_ttl_s: float,
        queries_per_session: int,
        nameservers: Sequence[tuple[str, int]] = (),
        observe: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._cache_names = cache_names
        self._min_ttl_s = min_ttl_s
        self._max_ttl_s = max_ttl_s
        self._queries_per_session = queries_per_session
        self._nameservers = tuple(nameservers)
        self._observe = observe
        self._cache: OrderedDict[str, tuple[float, Answer]] = OrderedDict()
        self._queries: dict[str, _Query] = {}
        self._running: dict[str, int] = {}
        self._queued: dict[str, deque[_Query]] = {}
        self._resolver: dns.asyncresolver.Resolver | None = None
        self.reload()

    def reload(self) -> None:
        """Read the host's nameservers anew."""
        self._resolver = None
        self._cache.clear()

    def cached(self, name: str) -> Answer | None:
        """Return the answer for `name` if it is still good."""
        entry = self._cache.get(name)
        if entry is None:
            return None
        if entry[0] <= self._loop.time():
            del self._cache[name]
            return None
        return entry[1]

    def resolve(self, name: str, session: str, waiter: Waiter) -> None:
        """Ask for `name` on behalf of `session`; `waiter` is called once, later, unless it is forgotten first."""
        query = self._queries.get(name)
        if query is None:
            query = self._queries[name] = _Query(name, session)
            if self._running.get(session, 0) < self._queries_per_session:
                self._start(query)
            else:
                # A sandbox that asks for many names at once waits for its own; other sessions are not slowed.
                self._queued.setdefault(session, deque()).append(query)
        query.waiters.append(waiter)

    def forget(self, name: str, waiter: Waiter) -> None:
        """Stop waiting. The query itself goes on: its answer serves the next one who asks."""
        query = self._queries.get(name)
        if query is not None and waiter in query.waiters:
            query.waiters.remove(waiter)

    async def look_up(self, name: str, session: str) -> Answer:
        """Return the answer for `name`, from the cache or from the network."""
        answer = self.cached(name)
        if answer is not None:
            return answer
        future: asyncio.Future[Answer] = self._loop.create_future()

        def waiter(result: Answer) -> None:
            if not future.done():
                future.set_result(result)

        self.resolve(name, session, waiter)
        try:
            return await future
        finally:
            self.forget(name, waiter)

    def close(self) -> None:
        """Cancel what is being asked."""
        for query in list(self._queries.values()):
            if query.task is not None:
                query.task.cancel()
        self._queries.clear()
        self._queued.clear()

    def _start(self, query: _Query) -> None:
        self._running[query.session] = self._running.get(query.session, 0) + 1
        query.task = self._loop.create_task(self._run(query))

    async def _run(self, query: _Query) -> None:
        started = self._loop.time()
        answer: Answer = ResolveError(DenyReason.RESOLVE_FAILED, f"the name {query.name} could not be resolved")
        ttl = FAILURE_TTL_S
        try:
            async with asyncio.timeout(self._timeout_s):
                answer, ttl = await self._ask(query.name)
        except TimeoutError:
            answer = ResolveError(DenyReason.RESOLVE_TIMEOUT, f"the name {query.name} was not resolved in time")
        except (dns.exception.DNSException, OSError, ValueError) as error:
            # Whatever a resolver answers, it is a failure of this name and of nothing else.
            log.debug("resolving %s failed: %s", query.name, type(error).__name__)
        finally:
            self._finished(query)
        self._observe(self._loop.time() - started)
        self._remember(query.name, answer, ttl)
        for waiter in query.waiters:
            waiter(answer)

    def _finished(self, query: _Query) -> None:
        self._queries.pop(query.name, None)
        running = self._running[query.session] - 1
        waiting = self._queued.get(query.session)
        if running:
            self._running[query.session] = running
        else:
            del self._running[query.session]
        if waiting:
            following = waiting.popleft()
            if not waiting:
                del self._queued[query.session]
            self._start(following)

    def _remember(self, name: str, answer: Answer, ttl: float) -> None:
        lifetime = min(max(ttl, self._min_ttl_s), self._max_ttl_s)
        self._cache[name] = (self._loop.time() + lifetime, answer)
        self._cache.move_to_end(name)
        while len(self._cache) > self._cache_names:
            self._cache.popitem(last=False)

    async def _ask(self, name: str) -> tuple[Answer, float]:
        """Return the answer and its time to live in seconds."""
        resolver = self._host_resolver()
        absolute = dns.name.from_text(name)
        four, six = await asyncio.gather(
            _ask_one(resolver, absolute, dns.rdatatype.A),
            _ask_one(resolver, absolute, dns.rdatatype.AAAA),
            return_exceptions=True,
        )
        for result in (four, six):
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result
        # One family may be missing. Where it failed instead (a timeout, SERVFAIL) the other one still serves: only
        # addresses that were answered are judged and dialled, so nothing unjudged can be reached.
        answers = [result for result in (six, four) if isinstance(result, tuple)]
        addresses = tuple(address for found, _ in answers for address in found)
        ttl = min((ttl for _, ttl in answers), default=FAILURE_TTL_S)
        if len(addresses) > MAX_ADDRESSES:
            return ResolveError(DenyReason.RESOLVE_FAILED, f"the name {name} has too many addresses"), ttl
        if addresses:
            return Resolved(addresses), ttl
        errors = [result for result in (four, six) if isinstance(result, Exception)]
        if any(isinstance(error, dns.resolver.NXDOMAIN) for error in errors):
            return ResolveError(DenyReason.NAME_NOT_FOUND, f"there is no name {name}"), ttl
        if any(isinstance(error, dns.exception.Timeout) for error in errors):
            return ResolveError(DenyReason.RESOLVE_TIMEOUT, f"the name {name} was not resolved in time"), FAILURE_TTL_S
        if errors:
            return ResolveError(DenyReason.RESOLVE_FAILED, f"the name {name} could not be resolved"), FAILURE_TTL_S
        return ResolveError(DenyReason.NAME_NOT_FOUND, f"the name {name} has no address"), ttl

    def _host_resolver(self) -> dns.asyncresolver.Resolver:
        if self._resolver is None:
            resolver = dns.asyncresolver.Resolver(configure=not self._nameservers)
            if self._nameservers:
                resolver.nameservers = [dns.nameserver.Do53Nameserver(*server) for server in self._nameservers]
            resolver.timeout = TRY_S
            resolver.lifetime = self._timeout_s
            # EDNS with 1,232 bytes avoids fragments, which an off-path attacker can forge (DNS flag day 2020).
            resolver.use_edns(0, payload=1232)
            self._resolver = resolver
        return self._resolver


async def _ask_one(
    resolver: dns.asyncresolver.Resolver, name: dns.name.Name, kind: dns.rdatatype.RdataType
) -> tuple[list[IPAddress], float]:
    answer = await resolver.resolve(name, kind, raise_on_no_answer=False, search=False)
    if answer.rrset is None:
        return [], min(float(answer.chaining_result.minimum_ttl), 60.0)
    if len(answer.rrset) > MAX_ADDRESSES:
        raise ValueError(f"{len(answer.rrset)} addresses")
    return [ipaddress.ip_address(record.address) for record in answer.rrset], float(answer.rrset.ttl)
