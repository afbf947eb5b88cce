"""Bytes as real clients send them."""

import base64
from typing import Final

BASIC: Final = b"Basic " + base64.b64encode(b"a-session-0123:" + b"t" * 43)
# What curl sends.
CONNECT: Final = (
    b"CONNECT files.pythonhosted.org:443 HTTP/1.1\r\nHost: files.pythonhosted.org:443\r\n"
    b"Proxy-Authorization: " + BASIC + b"\r\nUser-Agent: curl/7.88.1\r\nProxy-Connection: Keep-Alive\r\n\r\n"
)
# What an SDK sends to the model proxy.
MODEL: Final = (
    b"POST /model/a-session-0123/v1/messages?beta=true HTTP/1.1\r\nHost: opificia-gateway:8900\r\n"
    b"Accept: application/json\r\nContent-Type: application/json\r\nUser-Agent: claude-cli/1.0\r\n"
    b"Authorization: Bearer " + b"t" * 43 + b"\r\nanthropic-version: 2023-06-01\r\n"
    b"anthropic-beta: interleaved-thinking-2025-05-14\r\nx-stainless-lang: js\r\nx-stainless-os: Linux\r\n"
    b"x-stainless-runtime: node\r\nx-stainless-retry-count: 0\r\nAccept-Encoding: gzip, deflate, br, zstd\r\n"
    b"Content-Length: 115000\r\nConnection: keep-alive\r\n\r\n"
)
# What the forwarder puts in front: PROXY v2, TCP over IPv4.
PROXY_V2: Final = (
    b"\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c" + bytes((10, 231, 0, 16, 10, 231, 0, 2)) + b"\x9c\x40\x22\xc4"
)
