"""What is said about engine, containers and logs. Values only."""

import enum
from dataclasses import dataclass
from typing import Protocol


class EngineError(Exception):
    """The engine could not do it. `message` is one sentence for people, `remedy` what to do about it (may be empty)."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message} {remedy}".strip())
        self.message = message
        self.remedy = remedy


class EngineUnavailableError(EngineError):
    """The engine does not answer: away, hanging, or its socket is closed to us. Worth another try later."""


class NotFoundError(EngineError):
    """The engine has no such container, image, network or volume."""


class LogStream(enum.StrEnum):
    """The two outputs of a container, apart."""

    STDOUT = "stdout"
    STDERR = "stderr"


class LogSink(Protocol):
    """Where a container's output goes. Called from a log thread, one call at a time; must not touch the event loop."""

    def position(self, stream: LogStream) -> int:
        """Return how many bytes of `stream` have come in so far, also before a restart of control."""

    def read(self, stream: LogStream, offset: int, length: int) -> bytes:
        """Return what came in of `stream` from an offset on, at most `length` bytes, none at the end."""

    def full(self, stream: LogStream) -> bool:
        """Tell whether nothing more of `stream` will be kept."""

    def write(self, stream: LogStream, data: bytes) -> None:
        """Take the next bytes of `stream`. Raises OSError when they cannot be kept now: then none of them were."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The engine as it describes itself. `warnings`: what it cannot enforce, one sentence each."""

    version: str
    api_version: str
    memory_bytes: int
    cpus: int
    runtimes: tuple[str, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What a launch must know of an image. `own_runner`: its entrypoint is a runner (label `opificia.runner=own`).

    `can_run_runner`: it has a Python that can run the reference runner.
    """

    id: str
    volumes: tuple[str, ...]
    own_runner: bool
    can_run_runner: bool


@dataclass(frozen=True, slots=True)
class ContainerExit:
    """How a container ended, as the engine knows it.

    `oom_killed` only says that something in it was killed for memory, not that its first process was.
    `finished_at` is RFC 3339, empty when the engine does not know. `error` is the engine's own, if it could not start it.
    """

    exit_code: int
    oom_killed: bool
    error: str
    finished_at: str


@dataclass(frozen=True, slots=True)
class ObservedContainer:
    """A container of this installation, whatever its state.

    `state` is Docker's: created, running, paused, restarting, removing, exited, dead. `exit` is set once it has ended.
    """

    id: str
    name: str
    role: str
    session: str
    run: str
    policy_digest: str
    state: str
    started_at: str
    address: str
    exit: ContainerExit | None


@dataclass(frozen=True, slots=True)
class OutLimits:
    """Bounds of a result archive."""

    bytes: int
    entries: int


@dataclass(frozen=True, slots=True)
class OutSummary:
    """What was collected from /out. `truncated`: a bound was met, and what came after it is missing."""

    bytes: int
    entries: int
    truncated: bool
