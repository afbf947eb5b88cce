"""The whole life of sessions on the daemon, with processes for containers."""

from control.plan.session import Reason, SessionState
from tests.control.conftest import Host


async def test_a_session_runs_its_command_and_ends_with_its_exit_code(host: Host) -> None:
    session = await host.launch("sh", "-c", "echo out; echo err >&2; exit 7")
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.reason) == (SessionState.EXITED, Reason.EXIT_CODE)
    assert ended.life.exit is not None
    assert ended.life.exit.code == 7
    assert host.log(session) == b"out\n"
    assert host.log(session, "stderr") == b"err\n"
    await host.cleaned(session)
    assert not host.engine.containers
    assert not host.engine.volumes
    assert not host.gateway.grants
