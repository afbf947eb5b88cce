"""A reload leaves some of a session in the process before: both pay from one budget."""

import asyncio

from tests.net.test_handover import was_read
from tests.net.test_plain import ask
from tests.net.test_tunnel import server_on
from tests.support.gateway_process import TOKEN, gateway_process
from tests.support.origin import Exchange, origin
from tests.support.patience import until
from tests.support.sockets import Client

BYTES = 1_000_000
SESSIONS = (
    {"id": "s1", "egress_budget": {"bytes": BYTES, "connections": 8}},
    {"id": "s2", "egress_budget": {"bytes": 0, "connections": 1}},
)


async def got(client: Client) -> bool:
    """Read one more byte, if one comes."""
    try:
        return bool(await client.reader.read(1))
    except ConnectionError:
        return False


async def test_what_ends_in_the_process_before_a_reload_pays_from_the_budget_and_the_slots_of_the_session() -> None:
    over = asyncio.Event()

    async def begin_to_answer(exchange: Exchange) -> None:
        await exchange.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000\r\n\r\n")
        await over.wait()

    with gateway_process({"limits": {"egress_slot_wait_ms": 300_000}}, SESSIONS, stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None
        async with (
            origin(begin_to_answer) as server,
            server_on(None) as sink,  # type: ignore[arg-type]
            await gateway.client("s1") as first,
            await gateway.client("s2") as second,
            await gateway.client("s1") as tunnel,
            await gateway.client("s2") as waiting,
        ):
            for name, client in (("s1", first), ("s2", second)):
                await client.send(ask(server, credentials=(name, TOKEN)))
                await client.reader.readuntil(b"\r\n\r\n")
            await asyncio.to_thread(manager.reload)
            assert not manager.drained()
            # The one slot of the second is held in the process before.
            asked = asyncio.create_task(waiting.tunnel(f"127.0.0.1:{sink.port}", ("s2", TOKEN)))
            await asyncio.sleep(0)
            await until(lambda: was_read(waiting))
            # What the first has left is used up in the new process, which serves it after the other had asked.
            assert (await tunnel.tunnel(f"127.0.0.1:{sink.port}", ("s1", TOKEN))).status == 200
            assert not asked.done()
            tunnel.writer.write(b"x" * BYTES)
            await gateway.await_audit("s1", event="close", reason="budget_exhausted", kind="connect")
            # The process before stops soon, however much it had itself at the reload.
            writer = server.exchanges[0].writer
            passed = 0
            writer.write(b"x")
            while await got(first):
                passed += 1
                writer.write(b"x")
            assert passed < BYTES
            await gateway.await_audit("s1", event="close", reason="budget_exhausted", kind="http")
            assert not asked.done()
            await second.close()
            assert (await asked).status == 200
            over.set()
        await until(manager.drained)
