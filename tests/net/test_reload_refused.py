"""A reload that cannot be carried out changes nothing: it is refused with a reason, and the tunnels go on."""

import asyncio
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from gateway.core.parked import VERSION
from tests.host.chaos_windows import no_more_descriptors
from tests.net.test_reload import reloaded
from tests.net.test_tunnel import opened
from tests.support.code import readable_code
from tests.support.gateway_process import GatewayProcess, gateway_process
from tests.support.patience import until
from tests.support.processes import ConditionTimeoutError
from tests.support.sockets import echo_server


def code_with(gateway: GatewayProcess, old: str, new: str) -> Path:
    """Return a folder with the gateway's code, in which the record's module says something else."""
    folder = gateway.base / "other"
    shutil.copytree(readable_code() / "gateway", folder / "gateway", ignore=shutil.ignore_patterns("__pycache__"))
    module = folder / "gateway/core/parked.py"
    text = module.read_text()
    assert old in text
    module.write_text(text.replace(old, new))
    return folder


async def test_what_the_new_process_cannot_start_with_leaves_the_old_one_in_place() -> None:
    with gateway_process(stored=8) as gateway:
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            first = gateway.pid
            gateway.config["limits"]["drain_ms"] = "soon"
            gateway.write_files()
            with pytest.raises(ConditionTimeoutError, match="not replaced"):
                await reloaded(gateway)
            assert gateway.pid == first
            assert "this gateway goes on" in gateway.log()
            await client.send(b"x")
            assert await client.read_exactly(1) == b"x"
            gateway.config["limits"]["drain_ms"] = 100
            gateway.write_files()
            await reloaded(gateway)
            assert gateway.pid != first
            await client.send(b"y")
            assert await client.read_exactly(1) == b"y"


@pytest.mark.parametrize("place", ["metrics", "sandbox"])
async def test_an_address_that_another_program_has_leaves_the_old_process_and_its_tunnels_in_place(place: str) -> None:
    with gateway_process(stored=8) as gateway, socket.create_server(("127.0.0.1", 0)) as taken:
        manager = gateway.manager
        assert manager is not None
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            first, before = gateway.pid, gateway.config["listen"][place]
            gateway.config["listen"][place] = f"127.0.0.1:{taken.getsockname()[1]}"
            gateway.write_files()
            with pytest.raises(ConditionTimeoutError, match="not replaced"):
                await reloaded(gateway)
            assert gateway.pid == first
            assert "Address already in use; stop what uses it" in gateway.log()
            why = "the other gateway ended before it took over; its own messages say why; this gateway goes on"
            assert f"reload: {why}" in gateway.log()
            await client.send(b"x")
            assert await client.read_exactly(1) == b"x"
            async with await opened(gateway, f"127.0.0.1:{server.port}") as other:
                await other.send(b"y")
                assert await other.read_exactly(1) == b"y"
            gateway.config["listen"][place] = before
            gateway.write_files()
            await reloaded(gateway)
            assert gateway.pid != first
            await client.send(b"z")
            assert await client.read_exactly(1) == b"z"


async def test_a_gateway_without_a_descriptor_to_spare_outlives_a_reload_and_a_sighup_with_its_tunnels() -> None:
    with gateway_process(stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            first = gateway.pid
            with no_more_descriptors(Path("/proc"), first, lambda argv: subprocess.run(argv, check=True)):
                manager.signal(signal.SIGUSR2)
                await until(lambda: not manager.running or "this gateway goes on" in gateway.log())
                manager.signal(signal.SIGHUP)
                await until(lambda: not manager.running or "INFO gateway.app: reloaded" in gateway.log())
            await client.send(b"x")
            assert await client.read_exactly(1) == b"x"
            assert "sessions.toml: cannot be read: Too many open files" in gateway.log()
            assert "Traceback" not in gateway.log()
            await reloaded(gateway)
            assert gateway.pid != first
            await client.send(b"y")
            assert await client.read_exactly(1) == b"y"


async def test_a_record_that_nobody_would_read_is_found_out_before_anything_is_let_go() -> None:
    with gateway_process({"limits": {"drain_ms": 300}}, stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None
        manager.environment["PYTHONPATH"] = str(
            code_with(gateway, "MAX_BYTES: Final = 1 << 30", "MAX_BYTES: Final = 99")
        )
        await asyncio.to_thread(gateway.restart)
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            first = gateway.pid
            with pytest.raises(ConditionTimeoutError, match="not replaced"):
                await reloaded(gateway)
            assert gateway.pid == first
            assert re.search(r"reload: .* a record of \d+ bytes, more than 99; this gateway goes on", gateway.log())
            await client.send(b"x")
            assert await client.read_exactly(1) == b"x"
            await asyncio.to_thread(manager.stop)
            assert re.search(r"a record of \d+ bytes, more than 99; what is open is drained", gateway.log())
            assert await client.read_to_end() == b""
            # It has ended as it should: the next one will not say that it crashed.
            assert manager.names == []
            assert (await gateway.await_audit("s1", event="close"))["reason"] == "shutdown"


async def test_a_release_with_another_record_leaves_a_reload_undone_and_cuts_tunnels_at_a_restart_only() -> None:
    with gateway_process(stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None
        # As /opt/opificia/current: what it leads to changes under the running process.
        current = gateway.base / "current"
        newer = code_with(gateway, f"VERSION: Final = {VERSION}", f"VERSION: Final = {VERSION + 1}")
        current.symlink_to(readable_code())
        manager.environment["PYTHONPATH"] = str(current)
        await asyncio.to_thread(gateway.restart)
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            current.unlink()
            current.symlink_to(newer)
            first = gateway.pid
            with pytest.raises(ConditionTimeoutError, match="not replaced"):
                await reloaded(gateway)
            assert gateway.pid == first
            await client.send(b"x")
            assert await client.read_exactly(1) == b"x"
            await asyncio.to_thread(gateway.restart)
            assert await client.read_to_end() == b""
            wrong = f"it is of version {VERSION}, and this gateway reads version {VERSION + 1}"
            assert gateway.log().count(wrong) == 2
            assert (await gateway.await_audit("s1", event="close"))["reason"] == "shutdown"
            async with await opened(gateway, f"127.0.0.1:{server.port}") as other:
                await reloaded(gateway)
                await other.send(b"y")
                assert await other.read_exactly(1) == b"y"
