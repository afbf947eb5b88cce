"""Runs in a sandbox: asks the proxy and compares its answers. Arguments: `CONNECT host:port=status`, `GET http://host/=status`."""

import base64
import os
import socket
import sys
from urllib.parse import urlsplit

proxy = urlsplit(os.environ["HTTPS_PROXY"])
credentials = base64.b64encode(f"{proxy.username}:{proxy.password}".encode()).decode()
wrong = []
for argument in sys.argv[1:]:
    request, _, expected = argument.rpartition("=")
    host = request.split()[1].removeprefix("http://").split("/")[0]
    with socket.create_connection((proxy.hostname, proxy.port), timeout=30) as connection:
        head = f"{request} HTTP/1.1\r\nHost: {host}\r\nProxy-Authorization: Basic {credentials}\r\n\r\n"
        connection.sendall(head.encode())
        answer = connection.makefile("rb").readline().decode(errors="replace").strip()
    print(f"{request}: {answer}")
    if answer.split()[1:2] != [expected]:
        wrong.append(f"{request} was to be answered with {expected}, not with {answer!r}")
sys.exit("; ".join(wrong) or 0)
