"""What stands outside of the deployed host under chaos: the far end of its tunnels, and the name server that knows it.

python -m tests.host.chaos_outside ADDRESS PORT     until it is ended; SIGUSR1 silences the name server, SIGUSR2 wakes it
"""

import asyncio
import contextlib
import hashlib
import signal
import sys

from tests.host.chaos_load import HOST
from tests.support.dns_server import DnsServer, Records, Silence


async def give_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what comes, and at the end its SHA-256."""
    whole = hashlib.sha256()
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(65536):
            whole.update(piece)
            writer.write(piece)
            await writer.drain()
        writer.write(whole.digest())
        await writer.drain()
    writer.close()


async def main(address: str, port: int) -> None:
    """Serve until the process is ended."""
    answer = Records((address,), ttl=1)
    async with DnsServer(port=53) as names, await asyncio.start_server(give_back, address, port):
        names.script(HOST, answer)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, names.script, HOST, Silence())
        loop.add_signal_handler(signal.SIGUSR2, names.script, HOST, answer)
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
