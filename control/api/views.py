"""From what is stored to what the API shows."""

from control.api.types import SessionView, rfc3339
from control.db.rows import StoredSession
from gateway.contract.policy import Usage


def _optional_time(at_ms: int | None) -> str | None:
    return None if at_ms is None else rfc3339(at_ms)


def session_view(stored: StoredSession, queue_position: int | None = None, usage: Usage | None = None) -> SessionView:
    """Return a session as the API shows it. Its environment and token stay inside."""
    life, spec = stored.life, stored.spec
    return SessionView(
        id=stored.id,
        run_id=stored.run_id,
        state=life.state,
        image=spec.image,
        network=spec.network,
        command=spec.command,
        memory_bytes=stored.memory_bytes,
        cpus=stored.cpus,
        created_at=rfc3339(stored.created_at),
        reason=life.reason,
        message=life.message,
        ending=life.ending,
        queue_position=queue_position,
        runner_connected=life.connected,
        launched_at=_optional_time(life.launched_at),
        connected_at=_optional_time(life.connected_at),
        running_at=_optional_time(life.running_at),
        ended_at=_optional_time(life.ended_at),
        exit_code=None if life.exit is None else life.exit.code,
        oom_killed=life.exit is not None and life.exit.oom_killed,
        image_id=life.image_id,
        usage=usage,
        allow=spec.allow,
        deny=spec.deny,
    )
