"""What sandboxes may reach: the registries as this machine sees them, and a company's own server on a loopback address.

All servers run in a thread of their own, while the tests block on what a client does.
"""

import asyncio
import contextlib
import os
import secrets
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from tests.clients.corp import CorpServer
from tests.support.dns_server import DnsServer, Records
from tests.support.mirrors import registry_addresses
from tests.support.provider import FakeProvider
from tests.support.tls_server import Authority

T = TypeVar("T")

# One server, with names that differ only in what stands between a sandbox and it.
CORP: Final = "web.corp.example"
# Allowed by the same rule, but its address is a cloud's metadata service.
INSIDE: Final = "inside.corp.example"
# Leads to the server as well, whose certificate does not name it.
UNNAMED: Final = "unnamed.corp.example"
METADATA: Final = "169.254.169.254"
# A loopback address of this run's own, so that its ports 80 and 443 are free.
_ADDRESS: Final = f"127.90.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"


class World:
    """Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.authority: Final = Authority()
        self.provider: Final = FakeProvider(f"sk-ant-{secrets.token_urlsafe(32)}")
        self.corp: Final = CorpServer(folder / "git")
        self.dns: Final = DnsServer()
        self._loop: Final = asyncio.new_event_loop()
        self._thread: Final = threading.Thread(target=self._loop.run_forever)

    async def _start(self) -> None:
        await self.dns.__aenter__()
        for host, addresses in registry_addresses().items():
            self.dns.script(host, Records(addresses))
        for host in (CORP, UNNAMED):
            self.dns.script(host, Records((_ADDRESS,)))
        self.dns.script(INSIDE, Records((METADATA,)))
        await self.corp.start(_ADDRESS, self.authority.server_context(CORP, INSIDE))
        await self.provider.start()

    async def _stop(self) -> None:
        await self.provider.close()
        await self.corp.close()
        await self.dns.__aexit__()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=120)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._run(self._start())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                self._run(self._stop())
        finally:
            # Whatever failed: the interpreter does not end before its threads.
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
