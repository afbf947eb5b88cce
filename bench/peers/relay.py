"""A minimal relay to a model provider on aiohttp, as a peer: `relay.py PORT UPSTREAM KEY`."""

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web


async def serve(port: int, upstream: str, key: str) -> None:
    """Pass every request on and its reply back, each chunk as it comes."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as client:

        async def relay(request: web.Request) -> web.StreamResponse:
            headers = {"x-api-key": key, "content-type": request.headers.get("content-type", "application/json")}
            body = await request.read()
            async with client.request(
                request.method, f"http://{upstream}{request.path_qs}", headers=headers, data=body
            ) as reply:
                kind = reply.headers.get("content-type", "application/json")
                response = web.StreamResponse(status=reply.status, headers={"content-type": kind})
                if reply.content_length is not None:
                    response.content_length = reply.content_length
                await response.prepare(request)
                async for chunk in reply.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
