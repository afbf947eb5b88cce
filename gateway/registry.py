"""The sessions that the gateway knows, each in one place, so that budgets are exact.

It keeps grants and counts; it decides nothing about hosts, and speaks to no socket.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from gateway.contract.ids import is_session_id, is_sha256
from gateway.contract.policy import Grant, Usage, budget_problems
from gateway.core.budget import Slots
from gateway.core.model_budget import ModelAccount
from gateway.core.parked import ParkedSession
from gateway.core.rules import Policy, RegistryList, RuleErrors
from gateway.core.verdict import CloseReason, Deny, DenyReason

IPAddress = IPv4Address | IPv6Address
# "No limit" as a number, so that the byte path compares and subtracts and never asks.
UNLIMITED: Final = 1 << 62

_UNKNOWN = Deny(DenyReason.CREDENTIALS_WRONG, "the session is not known or its token is wrong")
_WRONG_ADDRESS = Deny(DenyReason.WRONG_ADDRESS, "the session's credentials were used from another place")


def hash_of(token: str) -> bytes:
    """Return the SHA-256 of a token as a client sent it."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


async def _nowhere_else(_session: "Session") -> None:
    """A process alone has cut all of a session with its own."""


class Session:
    """One live session: its grant, its counts, and what is open in its name."""

    __slots__ = (
        "_bytes_after", "_closers", "_resuming", "_slots_after", "_slots_before", "_token_hash", "address", "bytes_down",
        "bytes_left", "bytes_up", "egress_allowed", "egress_refused", "grant", "id", "model", "pipes", "policy", "reported",
        "slots",
    )  # fmt: skip

    def __init__(self, grant: Grant, policy: Policy, max_waiters: int) -> None:
        self.id = grant.session
        self.bytes_up = 0
        self.bytes_down = 0
        self.egress_allowed = 0
        self.egress_refused = 0
        self.pipes = 0
        # What this process knows of the ones before and after it, while they live at the same time.
        self._bytes_after = self._slots_before = self._slots_after = 0
        self.reported: Usage | None = None
        self._closers: set[Callable[[CloseReason], None]] = set()
        self._resuming: set[Callable[[CloseReason], None]] = set()
        self.slots = Slots(grant.egress_budget.connections, max_waiters)
        self.model = ModelAccount(grant.model_budget, grant.used)
        self._take(grant, policy)

    def _take(self, grant: Grant, policy: Policy) -> None:
        self.grant = grant
        self.policy = policy
        self.address: IPAddress | None = ip_address(grant.address) if grant.address else None
        self._token_hash = bytes.fromhex(grant.token_sha256)
        # Bytes that may still pass, both directions together; the splicer counts it down and stops at 0.
        budget = grant.egress_budget.bytes
        used = grant.used.egress_bytes_up + grant.used.egress_bytes_down + self.bytes_known
        self.bytes_left = max(0, budget - used) if budget else UNLIMITED

    def replace(self, grant: Grant, policy: Policy) -> bool:
        """Put a new grant in force; tell whether what was open had to be closed. What was used stays used."""
        narrowed = (
            grant.network != self.grant.network or grant.allow != self.grant.allow or grant.deny != self.grant.deny
        )
        moved = grant.address != self.grant.address or grant.token_sha256 != self.grant.token_sha256
        self._take(grant, policy)
        self.slots.resize(grant.egress_budget.connections)
        self.model.update(grant.model_budget, grant.used)
        if narrowed or moved:
            # An open tunnel was judged by the grant before; under another policy it has no right to go on.
            self.close(CloseReason.REVOKED)
        return narrowed or moved

    def knows_hash(self, token_hash: bytes) -> bool:
        """Tell in constant time whether this is the SHA-256 of the session's token."""
        return hmac.compare_digest(token_hash, self._token_hash)

    def parked(self, moving_slots: int) -> ParkedSession:
        """Return what the next process must know, when so many of the slots that are held here go over to it."""
        return ParkedSession(
            self.grant,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            egress_allowed=self.egress_allowed,
            egress_refused=self.egress_refused,
            slots_elsewhere=self.slots.held - moving_slots + self._slots_before,
            model=self.model.parked(),
        )

    def take_up(self, parked: ParkedSession) -> None:
        """Go on with the counts of the process before."""
        self.bytes_up = parked.bytes_up
        self.bytes_down = parked.bytes_down
        self.egress_allowed = parked.egress_allowed
        self.egress_refused = parked.egress_refused
        self.model.take_up(parked.model)
        self._take(self.grant, self.policy)

    def spent_before(self, usage: Usage) -> None:
        """Count what was used in the session's name in the process before."""
        self.bytes_up += usage.egress_bytes_up
        self.bytes_down += usage.egress_bytes_down
        self.bytes_left -= usage.egress_bytes_up + usage.egress_bytes_down
        self.egress_allowed += usage.egress_allowed
        self.egress_refused += usage.egress_refused
        self.model.spent_elsewhere(usage)

    def spent_after(self, size: int) -> None:
        """Take bytes from the budget that were moved in the process after, which counts them."""
        self._bytes_after += size
        self.bytes_left -= size

    @property
    def bytes_known(self) -> int:
        """How many bytes were moved in this epoch, in whatever process, as far as this one knows."""
        return self.bytes_up + self.bytes_down + self._bytes_after

    def hold_elsewhere(self, *, before: int | None = None, after: int | None = None) -> None:
        """Take as many slots as held by the processes before, or after, this one."""
        self._slots_before = self._slots_before if before is None else before
        self._slots_after = self._slots_after if after is None else after
        self.slots.elsewhere = self._slots_before + self._slots_after

    @property
    def slots_for_after(self) -> int:
        """What the process after must take as held elsewhere."""
        return self.slots.held + self._slots_before

    @property
    def slots_for_before(self) -> int:
        """What the process before must take as held elsewhere."""
        return self.slots.held + self._slots_after

    def add_closer(self, closer: Callable[[CloseReason], None], *, resumes: bool = False) -> None:
        """Have `closer` called once when the session is revoked. `resumes`: its client comes back and loses nothing."""
        self._closers.add(closer)
        if resumes:
            self._resuming.add(closer)

    def remove_closer(self, closer: Callable[[CloseReason], None]) -> None:
        """Forget `closer`; it ended by itself."""
        self._closers.discard(closer)
        self._resuming.discard(closer)

    def close(self, reason: CloseReason) -> None:
        """Close everything that is open in the session's name."""
        # One at a time: closing one gives its slot to another, which may end in the meantime, or begin.
        self._resuming.clear()
        while self._closers:
            self._closers.pop()(reason)

    @property
    def open_count(self) -> int:
        """Number of tunnels, streams and relays that are open."""
        return len(self._closers)

    @property
    def ending_count(self) -> int:
        """Number of those that a stop must wait for: what does not resume elsewhere."""
        return len(self._closers) - len(self._resuming)

    def usage(self) -> Usage:
        """Return what was used in this epoch."""
        # Asked of every session many times a second while two processes share them.
        model = self.model.usage()
        return Usage(
            self.bytes_up,
            self.bytes_down,
            self.egress_allowed,
            self.egress_refused,
            model.model_requests,
            model.input_tokens,
            model.output_tokens,
            model.cache_read_tokens,
            model.cache_write_tokens,
        )


class Registry:
    """All sessions by id."""

    def __init__(
        self, registries: RegistryList, *, require_address: bool, ready: bool, max_waiters: int = 1024
    ) -> None:
        self._registries = registries
        self._require_address = require_address
        self._max_waiters = max_waiters
        self._sessions: dict[str, Session] = {}
        # Whose each container address is.
        self._holders: dict[IPAddress, str] = {}
        # In the order of their coming.
        self._waiting: dict[Callable[[], None], None] = {}
        # False from start until control's first snapshot: an unknown session may only be not known yet.
        self.ready = ready
        # Told of each session whose connections were closed here because they are granted no more.
        self.on_cut: Callable[[Session], None] = lambda _session: None
        # Returns when what such a session had open in another process is closed and counted, too.
        self.has_cut: Callable[[Session], Awaitable[None]] = _nowhere_else
        # Told of each session that is known no more, after its last connection was closed.
        self.on_gone: Callable[[str], None] = lambda _session: None

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def held(self) -> tuple[int, int]:
        """Return how many connection slots and pipes all sessions hold."""
        sessions = self._sessions.values()
        return sum(session.slots.held for session in sessions), sum(session.pipes for session in sessions)

    def get(self, session_id: str) -> Session | None:
        """Return the session, or None."""
        return self._sessions.get(session_id)

    def authenticate(self, session_id: str, token: str, caller: IPAddress | None) -> Session | Deny:
        """Return the session whose id, token and (with PROXY headers) container address these are, else a Deny."""
        return self.authenticate_hash(session_id, hash_of(token), caller)

    def authenticate_hash(self, session_id: str, token_hash: bytes, caller: IPAddress | None) -> Session | Deny:
        """Do the same with the SHA-256 of a token."""
        session = self._sessions.get(session_id)
        if session is None or not session.knows_hash(token_hash):
            return _UNKNOWN
        return self.admit(session, caller)

    def admit(self, session: Session, caller: IPAddress | None) -> Session | Deny:
        """Return the session if it may be used from where `caller` is, else a Deny."""
        # On a port behind the forwarder the caller must be the session's own container: a token that leaked into
        # another sandbox opens nothing there. A grant without an address admits nobody.
        if self._require_address and (session.address is None or caller != session.address):
            return _WRONG_ADDRESS
        return session

    def put(self, grant: Grant) -> tuple[str, ...]:
        """Put a grant in force, replacing the session's earlier one. Returns its problems; with any, nothing changed."""
        problems = budget_problems(grant.egress_budget, grant.model_budget)
        if not is_session_id(grant.session):
            problems.append("the session id is not 1 to 64 of a-z, 0-9 and -")
        if not is_sha256(grant.token_sha256):
            problems.append("token_sha256 is not 64 lower-case hex digits")
        if grant.address is not None:
            try:
                holder = self._holders.get(ip_address(grant.address), grant.session)
            except ValueError:
                problems.append("address is not an IP address")
            else:
                if holder != grant.session:
                    problems.append(f"address is session {holder}'s")
        try:
            policy = Policy.compile(grant.network, grant.allow, grant.deny, self._registries)
        except RuleErrors as error:
            problems += error.problems
        if problems:
            return tuple(problems)
        session = self._sessions.get(grant.session)
        if session is None:
            session = self._sessions[grant.session] = Session(grant, policy, self._max_waiters)
        else:
            self._release_address(session)
            if session.replace(grant, policy):
                self.on_cut(session)
        if session.address is not None:
            self._holders[session.address] = session.id
        return ()

    def revoke(self, session_id: str) -> Session | None:
        """Forget a session and close what is open in its name. Returns it for its last counts."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._release_address(session)
            session.close(CloseReason.REVOKED)
            self.on_cut(session)
            self.on_gone(session_id)
        return session

    def cut(self, session_id: str) -> None:
        """Close what is open in a session's name, which goes on."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.close(CloseReason.REVOKED)
            self.on_cut(session)

    def _release_address(self, session: Session) -> None:
        if session.address is not None:
            del self._holders[session.address]
            session.address = None

    def replace_all(self, grants: Iterable[Grant]) -> tuple[str, ...]:
        """Put the whole picture in force: sessions that are not in it are revoked. Returns every problem."""
        grants = tuple(grants)
        for session_id in self._sessions.keys() - {grant.session for grant in grants}:
            self.revoke(session_id)
        for grant in grants:
            moved = self._sessions.get(grant.session)
            if moved is not None and moved.grant.address != grant.address:
                # Its place may be another's in the new picture, and the other may come first.
                self._release_address(moved)
        problems = []
        for grant in grants:
            bad = self.put(grant)
            if bad:
                # Fail closed: a grant that cannot be understood leaves nothing of the earlier one in force.
                self.revoke(grant.session)
                problems += [f"{grant.session[:64]}: {problem}" for problem in bad]
        self._become_ready()
        return tuple(problems)

    def _become_ready(self) -> None:
        self.ready = True
        waiting, self._waiting = self._waiting, {}
        for callback in waiting:
            callback()

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the first snapshot is in force."""
        self._waiting[callback] = None

    async def wait_ready(self, session_id: str, seconds: float) -> bool:
        """Wait until it can be said whether `session_id` is known: at once, or after control's first snapshot."""
        if self.ready or session_id in self._sessions:
            return True
        known = asyncio.Event()
        self.when_ready(known.set)
        try:
            async with asyncio.timeout(seconds):
                await known.wait()
        except TimeoutError:
            return False
        finally:
            self.stop_waiting(known.set)
        return True

    def stop_waiting(self, callback: Callable[[], None]) -> None:
        """Forget a callback given to `when_ready`."""
        self._waiting.pop(callback, None)
