"""A stop, a reload or a kill in the middle of a hand-over."""

import asyncio
import contextlib
import os
import signal

import pytest

from tests.net.test_tunnel import opened
from tests.support.gateway_process import TOKEN, gateway_process
from tests.support.patience import until
from tests.support.processes import ConditionTimeoutError
from tests.support.sockets import echo_server


async def test_a_process_that_is_stopped_while_it_takes_up_tunnels_parks_them_again() -> None:
    with gateway_process(stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            await asyncio.to_thread(manager.stop)
            # It has taken them out of the store, and nobody else has them.
            manager.then["FDSTOREREMOVE=1\nFDNAME=parked"] = lambda: manager.signal(signal.SIGTERM)
            with contextlib.suppress(ConditionTimeoutError):
                await asyncio.to_thread(manager.start)
            await until(lambda: not manager.running)
            assert manager.names == ["parked"]
            await asyncio.to_thread(manager.start)
            await client.send(b"x")
            assert await client.read_exactly(1) == b"x"


async def test_a_reload_that_is_asked_for_during_a_reload_comes_after_it() -> None:
    with gateway_process(stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            seen = [gateway.pid]

            def ask_again() -> None:
                seen.append(gateway.pid)
                manager.signal(signal.SIGUSR2)

            manager.then["MAINPID="] = ask_again
            await asyncio.to_thread(manager.reload)
            await until(lambda: gateway.pid not in seen and manager.messages[-1] == "READY=1")
            await until(manager.drained)
            await client.send(b"x")
            assert await client.read_exactly(1) == b"x"


async def test_a_process_that_is_killed_while_the_next_one_starts_is_followed_by_one_that_serves() -> None:
    with gateway_process(stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            manager.then["RELOADING=1"] = lambda: manager.signal(signal.SIGKILL)
            manager.signal(signal.SIGUSR2)
            await until(lambda: not manager.running)
            assert await client.read_to_end() == b""
            await asyncio.to_thread(manager.start)
            # The other one has no main process to take over from, and the port is this one's.
            async with await opened(gateway, f"127.0.0.1:{server.port}") as other:
                await other.send(b"x")
                assert await other.read_exactly(1) == b"x"
            assert "ended without handing over" in manager.log()


_STOPPING = ("STOPPING=1", "FDSTORE=1\nFDNAME=parked", "FDSTOREREMOVE=1\nFDNAME=alive", "BARRIER=1")
_STARTING = ("FDSTORE=1\nFDNAME=alive", "FDSTOREREMOVE=1\nFDNAME=parked", "READY=1")


@pytest.mark.parametrize("step", [*_STOPPING, *_STARTING])
async def test_a_process_that_is_killed_at_any_step_of_a_restart_loses_nothing_or_the_next_one_says_so(
    step: str,
) -> None:
    with gateway_process(stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            if step in _STARTING:
                await asyncio.to_thread(manager.stop)
            manager.then[step] = lambda: manager.signal(signal.SIGKILL)
            with contextlib.suppress(ConditionTimeoutError):
                await asyncio.to_thread(manager.start if step in _STARTING else manager.stop)
            await until(lambda: not manager.running)
            assert step not in manager.then
            await asyncio.to_thread(manager.start)
            lost = False
            try:
                await client.send(b"x")
                assert await client.read_exactly(1) == b"x"
            except (ConnectionError, asyncio.IncompleteReadError):
                lost = True
            assert ("ended without handing over" in manager.log()) == lost
            assert manager.names == ["alive"]


async def test_a_thousand_tunnels_go_on_after_a_restart_and_a_reload() -> None:
    session = {"id": "s1", "egress_budget": {"bytes": 0, "connections": 2000}}
    with gateway_process({"limits": {"unauthenticated_per_source": 2000}}, [session], stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None
        async with echo_server() as server, contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(await opened(gateway, f"127.0.0.1:{server.port}")) for _ in range(1000)
            ]
            for go_on in (manager.restart, manager.reload):
                await asyncio.to_thread(go_on)
                for client in clients:
                    client.writer.write(b"x")
                for client in clients:
                    assert await client.read_exactly(1) == b"x"


async def test_a_process_that_is_stopped_while_the_next_one_starts_beside_it_stops() -> None:
    with gateway_process(stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            first = gateway.pid
            # The next one reads its configuration when it is written.
            file = gateway.base / "gateway.toml"
            text = file.read_text()
            file.unlink()
            os.mkfifo(file)
            manager.signal(signal.SIGUSR2)
            await until(lambda: any(each.startswith("RELOADING=1") for each in manager.messages))
            # To this one alone: the other may have been forked a moment later.
            manager.signal(signal.SIGTERM)
            await asyncio.to_thread(file.write_text, text)
            await until(lambda: not manager.running)
            file.unlink()
            gateway.write_files()
            assert gateway.pid == first
            assert manager.names == ["parked"]
            await asyncio.to_thread(manager.start)
            await client.send(b"x")
            assert await client.read_exactly(1) == b"x"
        assert "Traceback" not in gateway.log()


async def test_a_sighup_while_a_process_takes_up_tunnels_waits_until_it_serves() -> None:
    with gateway_process(sessions=[{"id": "s1"}, {"id": "s2"}], stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:

            def revoke() -> None:
                # The new process has read the file as it was.
                gateway.sessions = [each for each in gateway.sessions if each["id"] == "s1"]
                gateway.write_files()
                manager.signal(signal.SIGHUP)

            manager.then["FDSTORE=1\nFDNAME=alive"] = revoke
            await asyncio.to_thread(gateway.restart)
            await client.send(b"x")
            assert await client.read_exactly(1) == b"x"
            await until(lambda: "INFO gateway.app: reloaded" in gateway.log())
            async with await gateway.client("s1") as other:
                assert (await other.tunnel(f"127.0.0.1:{server.port}", ("s2", TOKEN))).status == 407
