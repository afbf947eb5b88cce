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
# How long addresses of one family wait for those of the other. RFC 8305 §3 has 50 ms, for people who wait for pages.
RESOLUTION_DELAY_S: Final = 0.25
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
# Addresses of one family and their time to live in seconds.
Found = tuple[list[IPAddress], float]
Waiter = Callable[[Answer], None]


class _Query:
    """One name being asked for, and who waits."""

    __slots__ = ("asked", "name", "session", "task", "waiters")

    def __init__(self, name: str, session: str, asked: float) -> None:
        self.name = name
        # Who pays for it. `asked` is when, in the loop's time.
        self.session = session
        self.asked = asked
        # In order; a dictionary, because a session may have a thousand and each may leave.
        self.waiters: dict[Waiter, None] = {}
        # None while it waits for its session's turn.
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
            query = self._queries[name] = _Query(name, session, self._loop.time())
            if self._may_start(session):
                self._start(query)
            else:
                # A sandbox that asks for many names at once waits for its own; other sessions are not slowed.
                self._queued.setdefault(session, deque()).append(query)
        elif query.task is None and query.session != session and self._may_start(session):
            # Nor are they when they ask for a name that waits in its queue.
            self._leave_queue(query)
            query.session, query.asked = session, self._loop.time()
            self._start(query)
        query.waiters[waiter] = None

    def forget(self, name: str, waiter: Waiter) -> None:
        """Stop waiting. The query itself goes on: its answer serves the next one who asks."""
        query = self._queries.get(name)
        if query is not None:
            query.waiters.pop(waiter, None)

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

    def _may_start(self, session: str) -> bool:
        return self._running.get(session, 0) < self._queries_per_session

    def _leave_queue(self, query: _Query) -> None:
        waiting = self._queued[query.session]
        waiting.remove(query)
        if not waiting:
            del self._queued[query.session]

    def _start(self, query: _Query) -> None:
        self._running[query.session] = self._running.get(query.session, 0) + 1
        query.task = self._loop.create_task(self._run(query))

    async def _run(self, query: _Query) -> None:
        try:
            # The queue of its session took all its time: those who wait have waited long enough. Nobody else should.
            if self._loop.time() - query.asked > self._timeout_s:
                answer: Answer = _late(query.name)
            else:
                answer = await self._ask_in_time(query.name)
            # One by one: what a waiter does with the answer may make others leave.
            while query.waiters:
                waiter = next(iter(query.waiters))
                del query.waiters[waiter]
                waiter(answer)
        finally:
            self._finished(query)

    async def _ask_in_time(self, name: str) -> Answer:
        """Return the answer, whatever happens, and remember it."""
        started = self._loop.time()
        ttl = FAILURE_TTL_S
        try:
            async with asyncio.timeout(self._timeout_s):
                answer, ttl = await self._ask(name)
        except TimeoutError:
            answer = _late(name)
        except (dns.exception.DNSException, OSError, ValueError) as error:
            # Whatever a resolver answers, it is a failure of this name and of nothing else.
            log.debug("resolving %s failed: %s", name, type(error).__name__)
            answer = ResolveError(DenyReason.RESOLVE_FAILED, f"the name {name} could not be resolved")
        self._observe(self._loop.time() - started)
        self._remember(name, answer, ttl)
        return answer

    def _finished(self, query: _Query) -> None:
        if self._queries.get(query.name) is query:
            del self._queries[query.name]
        running = self._running[query.session] - 1
        if running:
            self._running[query.session] = running
        else:
            del self._running[query.session]
        waiting = self._queued.get(query.session)
        if waiting:
            following = waiting[0]
            self._leave_queue(following)
            self._start(following)

    def _remember(self, name: str, answer: Answer, ttl: float) -> None:
        lifetime = min(max(ttl, self._min_ttl_s), self._max_ttl_s)
        self._cache[name] = (self._loop.time() + lifetime, answer)
        self._cache.move_to_end(name)
        while len(self._cache) > self._cache_names:
            self._cache.popitem(last=False)

    async def _ask(self, name: str) -> tuple[Answer, float]:
        """Return the answer and its time to live in seconds."""
        four, six = await self._ask_both(dns.name.from_text(name))
        return put_together(name, four, six)

    async def _ask_both(self, name: dns.name.Name) -> list[Found | Exception]:
        """Ask for IPv4 and IPv6 addresses at once, and return what came of each."""
        resolver = self._host_resolver()
        tasks = [
            self._loop.create_task(_ask_one(resolver, name, kind)) for kind in (dns.rdatatype.A, dns.rdatatype.AAAA)
        ]
        try:
            first, second = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            found = any(task.exception() is None and task.result()[0] for task in first)
            # There are servers that never answer for one of the families; who has addresses does not wait for them.
            if second:
                await asyncio.wait(second, timeout=RESOLUTION_DELAY_S if found else None)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        return [result if isinstance(result, tuple | Exception) else TimeoutError() for result in results]

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


def _late(name: str) -> ResolveError:
    return ResolveError(DenyReason.RESOLVE_TIMEOUT, f"the name {name} was not resolved in time")


def put_together(name: str, four: Found | Exception, six: Found | Exception) -> tuple[Answer, float]:
    """Return the answer that follows from what came of each family, and its time to live in seconds."""
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
        return _late(name), FAILURE_TTL_S
    if errors:
        return ResolveError(DenyReason.RESOLVE_FAILED, f"the name {name} could not be resolved"), FAILURE_TTL_S
    return ResolveError(DenyReason.NAME_NOT_FOUND, f"the name {name} has no address"), ttl


async def _ask_one(resolver: dns.asyncresolver.Resolver, name: dns.name.Name, kind: dns.rdatatype.RdataType) -> Found:
    return found_in(await resolver.resolve(name, kind, raise_on_no_answer=False, search=False))


def found_in(answer: dns.resolver.Answer) -> Found:
    """Return the addresses that an answer gives. Raises ValueError when they are too many."""
    if answer.rrset is None:
        return [], min(float(answer.chaining_result.minimum_ttl), 60.0)
    if len(answer.rrset) > MAX_ADDRESSES:
        raise ValueError(f"{len(answer.rrset)} addresses")
    return [ipaddress.ip_address(record.address) for record in answer.rrset], float(answer.rrset.ttl)
