"""A minimal relay to a model provider on aiohttp, as a peer: `relay.py PORT UPSTREAM KEY [LOG]`.

It does what a relay cannot leave out: pass the end-to-end headers of request and reply, put the key in, stream the reply's
body as it comes, keep connections alive on both sides. Nothing is checked, limited or counted. With LOG it writes
aiohttp's own access log, a line a request, to that file.
"""

import asyncio
import logging
import sys

import aiohttp
import uvloop
from aiohttp import web

# RFC 9110 §7.6.1, and what aiohttp frames itself.
_NOT_PASSED = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host", "content-length"}
_CREDENTIALS = {"authorization", "x-api-key", "cookie", "proxy-authorization"}
# Set by aiohttp's client unless told otherwise.
_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


async def serve(port: int, upstream: str, key: str, log: str) -> None:
    """Pass every request on and its reply back, each chunk as it comes."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        skip_auto_headers=_ADDED,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=3600, sock_read=300),
    ) as client:

        async def relay(request: web.Request) -> web.StreamResponse:
            headers = [
                (name, value)
                for name, value in request.headers.items()
                if name.lower() not in _NOT_PASSED and name.lower() not in _CREDENTIALS
            ]
            headers.append(("x-api-key", key))
            body = await request.read()
            async with client.request(
                request.method,
                f"http://{upstream}{request.path_qs}",
                headers=headers,
                data=body,
                allow_redirects=False,
            ) as reply:
                response = web.StreamResponse(status=reply.status, reason=reply.reason)
                for name, value in reply.headers.items():
                    if name.lower() not in _NOT_PASSED:
                        response.headers.add(name, value)
                if reply.content_length is not None:
                    response.content_length = reply.content_length
                await response.prepare(request)
                async for chunk in reply.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", relay)
        access_log = None
        if log:
            access_log = logging.getLogger("aiohttp.access")
            access_log.setLevel(logging.INFO)
            access_log.addHandler(logging.FileHandler(log))
        runner = web.AppRunner(app, access_log=access_log)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] if len(sys.argv) > 4 else ""))
