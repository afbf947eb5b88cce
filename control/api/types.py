"""What the API takes and gives, as msgspec types; the OpenAPI document is made from them. Times are RFC 3339 in UTC."""

import functools
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from control.plan.session import Event, Reason, SessionState
from control.runner.messages import Encoding, Stream
from control.spec import SessionPolicy
from gateway.contract.opinion import EgressOpinion
from gateway.contract.policy import NetworkLevel, Usage


class SessionView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A session. `exit_code` is the container's; `queue_position` counts from 1 while it waits for room."""

    id: str
    run_id: str
    state: SessionState
    image: str
    network: NetworkLevel
    command: tuple[str, ...]
    memory_bytes: int
    cpus: float
    created_at: str
    reason: Reason | None = None
    message: str = ""
    ending: Reason | None = None
    queue_position: int | None = None
    runner_connected: bool = False
    launched_at: str | None = None
    connected_at: str | None = None
    running_at: str | None = None
    ended_at: str | None = None
    exit_code: int | None = None
    oom_killed: bool = False
    image_id: str = ""
    usage: Usage | None = None
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


class SessionPage(msgspec.Struct, frozen=True):
    """Sessions from the newest to the oldest. `next`: the cursor of the page after this one, None at the end."""

    sessions: tuple[SessionView, ...]
    next: str | None = None


class EgressCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What would the gateway decide about these hosts (`host`, `host:port`; the port is 443 if not given)?

    Under the policy of a `session`, ended or not, or under a `policy` of one's own; exactly one of them.
    """

    hosts: Annotated[tuple[str, ...], Meta(min_length=1, max_length=64)]
    session: str = ""
    policy: SessionPolicy | None = None


class EgressChecked(msgspec.Struct, frozen=True):
    """The gateway's opinions, in the order of the hosts, and the policy that they come from."""

    policy: SessionPolicy
    opinions: tuple[EgressOpinion, ...]


class GatewaySession(msgspec.Struct, frozen=True):
    """A session that the gateway serves, and what it has used."""

    id: str
    network: NetworkLevel
    address: str
    usage: Usage


class GatewayView(msgspec.Struct, frozen=True):
    """The gateway as control knows it. `epoch` is that of the gateway's process, empty before the first connection."""

    connected: bool
    epoch: str
    sessions: tuple[GatewaySession, ...]


class StopRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to stop: the grace between SIGTERM and SIGKILL, the operator's default if not given."""

    grace_ms: Annotated[int, Meta(ge=0, le=600_000)] | None = None


class RunRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command for a connected session. `timeout_ms` 0: none."""

    argv: tuple[str, ...]
    cwd: str = "/work"
    env: dict[str, str] = {}
    stdin: str = ""
    stdin_encoding: Encoding = Encoding.UTF8
    timeout_ms: Annotated[int, Meta(ge=0, le=2**53)] = 0


class RunOutput(msgspec.Struct, frozen=True, tag="output"):
    """A line of a run's answer: a piece of output."""

    stream: Stream
    data: str
    encoding: Encoding = Encoding.UTF8


class RunCompleted(msgspec.Struct, frozen=True, tag="completed"):
    """The last line of a run's answer: its end, as the runner reports it."""

    exit_code: int
    timed_out: bool = False
    error: str = ""


class RunBroken(msgspec.Struct, frozen=True, tag="broken"):
    """The last line of a run's answer when there will be no end: the session is over, or the reader was too slow."""

    message: str


RunLine = RunOutput | RunCompleted | RunBroken


class EventView(msgspec.Struct, frozen=True):
    """One event of a session. `event` is tagged by `type`."""

    number: int
    at: str
    event: Event


class LogLine(msgspec.Struct, frozen=True):
    """A piece of output in the merged log. `at`: when control received it."""

    at: str
    stream: Stream
    data: str
    encoding: Encoding = Encoding.UTF8


class Health(msgspec.Struct, frozen=True):
    """`status` is `ok`, or `degraded` when one of the parts is not; then `problems` says what and what to do."""

    status: str
    version: str
    host_id: str
    problems: tuple[str, ...] = ()
    running: int = 0
    waiting: int = 0


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error, as RFC 9457 describes it; `reason` is for programs, `problems` for several at once."""

    type: str
    title: str
    status: int
    detail: str
    reason: str
    problems: tuple[str, ...] = ()
    remedy: str = ""


def rfc3339(at_ms: int) -> str:
    """Return milliseconds since the epoch as RFC 3339 in UTC."""
    seconds, milliseconds = divmod(at_ms, 1000)
    return f"{_rfc3339_seconds(seconds)}.{milliseconds:03d}Z"


# A page of sessions holds five times each, mostly of the same few seconds: a third of what the page cost.
@functools.lru_cache(maxsize=4096)
def _rfc3339_seconds(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
