"""What to do about sessions and containers found at a start: database, journal and engine brought together. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from control.plan.session import Session, SessionState


@dataclass(frozen=True, slots=True)
class Found:
    """A container of this installation, as the engine shows it. `ran`: it was started once.

    `policy` is the digest of the policy under which it was made, as its label says.
    """

    id: str
    session: str
    ran: bool
    policy: str = ""


@dataclass(frozen=True, slots=True)
class Requeue:
    """The session waited for room: it waits again."""

    session: str


@dataclass(frozen=True, slots=True)
class Relaunch:
    """The session's launch was cut before its container was started: it waits for room again.

    `container`: what was made for it, empty if nothing was. It cannot be started, because nobody knows its token any more.
    """

    session: str
    container: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """The session's container was started: follow it to its end, or take down what has ended meanwhile."""

    session: str
    container: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The session's container was made under another policy than the session has now: follow it, and end it at once.

    The gateway would enforce the stored policy on what was started under another one: a database that was set back may have
    made the session anew, or somebody has changed it. Neither is ours to grant.
    """

    session: str
    container: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The session was to end while it was launched, or its container is gone: it cannot be taken up again."""

    session: str
    vanished: bool


@dataclass(frozen=True, slots=True)
class CleanUp:
    """The session has ended, but its container, volume or address may be left."""

    session: str


@dataclass(frozen=True, slots=True)
class RemoveStray:
    """A container of ours that no live session knows: keep its logs, then remove it."""

    container: str
    session: str
    ran: bool


Action = Requeue | Relaunch | Adopt | Refuse | Fail | CleanUp | RemoveStray


def reconcile(
    sessions: Mapping[str, Session], policies: Mapping[str, str], containers: Iterable[Found]
) -> list[Action]:
    """Return what to do, sessions in the order given (which is the order of the queue), then stray containers.

    `sessions` are those that are not cleaned up, `policies` the digests of what they are to be granted.
    """
    found = {container.id: container for container in containers}
    by_session = {container.session: container for container in found.values()}
    actions: list[Action] = []
    claimed: set[str] = set()
    for name, life in sessions.items():
        if life.state.final:
            actions.append(CleanUp(name))
            continue
        if life.state is SessionState.CREATED:
            # What an earlier launch made, if the daemon died before it took it away.
            left = by_session.get(name)
            if left is not None and life.waiting:
                claimed.add(left.id)
                actions.append(Relaunch(name, left.id))
            elif life.waiting:
                actions.append(Requeue(name))
            continue
        # A container that was made in the moment of the crash is not in the record yet; its label tells.
        container = found.get(life.container) or by_session.get(name)
        if container is not None:
            claimed.add(container.id)
        if container is not None and container.ran:
            same = container.policy == policies[name]
            actions.append(Adopt(name, container.id) if same else Refuse(name, container.id))
        elif life.container and container is None:
            # It may have run, and nobody knows how it ended.
            actions.append(Fail(name, vanished=True))
        elif life.state is SessionState.LAUNCHING and life.ending is None and life.exit is None:
            actions.append(Relaunch(name, "" if container is None else container.id))
        else:
            actions.append(Fail(name, vanished=False))
            if container is not None:
                actions.append(RemoveStray(container.id, name, ran=False))
    strays = [container for container in found.values() if container.id not in claimed]
    ended = {name for name, life in sessions.items() if life.state.final}
    actions += [RemoveStray(each.id, each.session, each.ran) for each in strays if each.session not in ended]
    return actions
