"""Plain HTTP as real clients speak it: curl and Python's urllib, with what they send by themselves."""

import asyncio
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.net.test_plain import HTTP_ADDRESS
from tests.support.gateway_process import TOKEN, GatewayProcess
from tests.support.origin import HELLO, Exchange, origin
from tests.support.patience import PATIENCE_S

if shutil.which("curl") is None:
    pytest.skip("curl is not installed: run scripts/setup", allow_module_level=True)


async def curl(gateway: GatewayProcess, *arguments: str, session: str = "s1") -> tuple[int, bytes]:
    """Return curl's exit status and output."""
    process = await asyncio.create_subprocess_exec(
        *(
            "curl",
            "--silent",
            "--show-error",
            "--proxy",
            f"http://{session}:{TOKEN}@127.0.0.1:{gateway.port}",
            *arguments,
        ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"PATH": "/usr/bin:/bin"},
    )
    async with asyncio.timeout(PATIENCE_S):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output


async def take_body(exchange: Exchange) -> None:
    """Answer with the size of the request's body, however it is framed."""
    head = exchange.head.lower()
    if b"expect: 100-continue" in head:
        await exchange.answer(b"HTTP/1.1 100 Continue\r\n\r\n")
    size = 0
    if b"transfer-encoding: chunked" in head:
        while chunk := int(await exchange.reader.readline(), 16):
            size += len(await exchange.body(chunk + 2)) - 2
        await exchange.body(2)
    elif b"content-length: " in head:
        size = len(await exchange.body(int(head.split(b"content-length: ")[1].split(b"\r\n")[0])))
    answer = str(size).encode()
    await exchange.answer(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))


async def test_curl_fetches_several_urls_over_one_connection(gateway: GatewayProcess) -> None:
    async with origin() as server:
        url = f"http://127.0.0.1:{server.server.port}"
        assert await curl(gateway, f"{url}/1", f"{url}/2", f"{url}/3") == (0, b"hello" * 3)
        assert server.connections == 1
        assert b"roxy" not in b"".join(server.heads)


@pytest.mark.parametrize("framing", [[], ["--header", "Transfer-Encoding: chunked"]])
async def test_curl_uploads_with_expect(gateway: GatewayProcess, tmp_path: Path, framing: list[str]) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 2_000_000)
    async with origin(take_body) as server:
        url = f"http://127.0.0.1:{server.server.port}/"
        assert await curl(gateway, "--upload-file", str(file), *framing, url) == (0, b"2000000")
        assert b"Expect: 100-continue" in server.heads[0]


async def test_curl_asks_for_a_head_only(gateway: GatewayProcess) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(HELLO[: -len(b"hello")])

    async with origin(script) as server:
        status, output = await curl(gateway, "--head", f"http://127.0.0.1:{server.server.port}/")
        assert status == 0
        assert b"Content-Length: 5" in output


async def test_curl_goes_through_a_tunnel_to_port_80(gateway: GatewayProcess) -> None:
    async with origin(host=HTTP_ADDRESS, port=80):
        url = f"http://{HTTP_ADDRESS}/"
        assert await curl(gateway, "--proxytunnel", url, url) == (0, b"hello" * 2)


async def test_curl_sees_a_refusal_and_its_reason(gateway: GatewayProcess) -> None:
    status, output = await curl(gateway, "--include", "http://169.254.169.254/latest/meta-data/")
    assert status == 0
    assert output.startswith(b"HTTP/1.1 403 address_not_public")
    assert b'"reason":"address_not_public"' in output


async def test_urllib_sees_a_refusal_and_its_reason(gateway: GatewayProcess) -> None:
    proxy = f"http://listed:{TOKEN}@127.0.0.1:{gateway.port}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": proxy}))
    with pytest.raises(urllib.error.HTTPError, match="host_not_listed") as refused:
        await asyncio.to_thread(opener.open, "http://unlisted.example.org/", timeout=PATIENCE_S)
    refused.value.close()
