"""A CONNECT proxy that drops every hundredth connection: `dropping_proxy.py PORT`. A benchmark must give it no result."""

import asyncio
import itertools
import sys
from typing import Final

_EVERY: Final = 100


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()


async def main(port: int) -> None:
    """Serve until killed."""
    numbers = itertools.count(1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if next(numbers) % _EVERY == 0:
                return
            host, _, target_port = head.split()[1].decode().rpartition(":")
            there, back = await asyncio.open_connection(host, int(target_port))
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))
            back.close()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
