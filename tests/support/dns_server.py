"""A name server that answers by script, over UDP and TCP on one port of 127.0.0.1.

Each name has a list of answers; every query takes the next one, and the last stays. So one name can answer a
public address first and a private one after (rebinding), or fail once and then work.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, Self

import dns.flags
import dns.message
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from tests.support.listener import StreamServer, bound

_BIND_TRIES: Final = 20


@dataclass(frozen=True, slots=True)
class Records:
    """Answer with these: addresses (A or AAAA by their form) and, before them, a chain of CNAMEs."""

    addresses: tuple[str, ...] = ()
    ttl: int = 60
    cnames: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """Answer with an error code: `dns.rcode.SERVFAIL`, `NXDOMAIN`, `REFUSED` …"""

    rcode: dns.rcode.Rcode


@dataclass(frozen=True, slots=True)
class Silence:
    """Never answer."""


@dataclass(frozen=True, slots=True)
class Truncated:
    """Over UDP say that the answer does not fit; over TCP give it."""

    records: Records


@dataclass(frozen=True, slots=True)
class Garbage:
    """Answer with these bytes behind the query's own id."""

    body: bytes


Answer = Records | Failure | Silence | Truncated | Garbage
NO_SUCH_NAME: Final = Failure(dns.rcode.NXDOMAIN)


@dataclass(frozen=True, slots=True)
class Query:
    """One query as it came: a name in lower case without the last dot, `A`/`AAAA`, `udp`/`tcp`."""

    name: str
    kind: str
    transport: str


class DnsServer:
    """Use as an async context manager; `address` is what goes into the gateway's `nameservers`."""

    def __init__(self, *, port: int = 0, otherwise: Answer = NO_SUCH_NAME) -> None:
        """`port` 0 takes a free one; `otherwise` answers for every name without a script."""
        self._wanted_port = port
        self._otherwise = otherwise
        self._answers: dict[tuple[str, str | None], list[Answer]] = {}
        self._udp: asyncio.DatagramTransport | None = None
        self._tcp: StreamServer | None = None
        self._arrived = asyncio.Event()
        self._released = asyncio.Event()
        self._released.set()
        self.queries: list[Query] = []
        self.port = 0

    @property
    def address(self) -> str:
        """`127.0.0.1:port`."""
        return f"127.0.0.1:{self.port}"

    def script(self, name: str, *answers: Answer, kind: str | None = None) -> None:
        """Set what `name` answers, in turn; `kind` ("A", "AAAA") limits it to that type of query.

        Without a kind, addresses of the other family are left out of an answer by themselves. A name without
        a script does not exist.
        """
        self._answers[(name.lower(), kind)] = list(answers)

    def hold(self) -> None:
        """Answer nothing until `release`; queries are counted."""
        self._released.clear()

    def release(self) -> None:
        """Answer what was held, and go on."""
        self._released.set()

    def count(self, name: str, kind: str | None = None) -> int:
        """Return how many queries came for `name`."""
        return sum(query.name == name and kind in (None, query.kind) for query in self.queries)

    async def arriving(self) -> AsyncIterator[Query]:
        """Yield each query as it comes, without end."""
        seen = 0
        while True:
            while seen < len(self.queries):
                yield self.queries[seen]
                seen += 1
            self._arrived.clear()
            await self._arrived.wait()

    async def __aenter__(self) -> Self:
        for attempt in range(_BIND_TRIES):
            tcp = bound(("127.0.0.1", self._wanted_port))
            self.port = tcp.getsockname()[1]
            # Bound by ourselves: uvloop leaves an endpoint that it cannot bind unclosed.
            udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                udp.bind(("127.0.0.1", self.port))
            except OSError:  # another process has the UDP port of this number
                tcp.close()
                udp.close()
                if attempt == _BIND_TRIES - 1:
                    raise
            else:
                break
        self._tcp = StreamServer(self._serve_tcp, tcp)
        self._udp, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: _Datagrams(self), sock=udp)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._released.set()
        if self._udp is not None:
            self._udp.close()
        if self._tcp is not None:
            await self._tcp.stop()

    async def respond(self, wire: bytes, transport: str) -> bytes | None:
        """Return the reply to one query, None for silence."""
        query = dns.message.from_wire(wire)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True).lower()
        kind = dns.rdatatype.to_text(question.rdtype)
        self.queries.append(Query(name, kind, transport))
        self._arrived.set()
        answer = self._next(name, kind)
        await self._released.wait()
        response = dns.message.make_response(query, recursion_available=True)
        match answer:
            case Silence():
                return None
            case Garbage(body):
                return wire[:2] + body
            case Failure(rcode):
                response.set_rcode(rcode)
            case Truncated(records):
                if transport == "udp":
                    response.flags |= dns.flags.TC
                else:
                    _fill(response, records, name, kind)
            case Records():
                _fill(response, answer, name, kind)
        return response.to_wire(max_size=65535)

    def _next(self, name: str, kind: str) -> Answer:
        answers = self._answers.get((name, kind)) or self._answers.get((name, None))
        if answers is None:
            return self._otherwise
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def _serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                (length,) = struct.unpack("!H", await reader.readexactly(2))
                reply = await self.respond(await reader.readexactly(length), "tcp")
                if reply is not None:
                    writer.write(struct.pack("!H", len(reply)) + reply)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server
        self._transport: asyncio.DatagramTransport | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        task = asyncio.ensure_future(self._answer(data, addr))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, data: bytes, address: Any) -> None:
        reply = await self._server.respond(data, "udp")
        if reply is not None and self._transport is not None:
            self._transport.sendto(reply, address)


def _fill(response: dns.message.Message, records: Records, name: str, kind: str) -> None:
    owner = f"{name}."
    for target in records.cnames:
        response.answer.append(dns.rrset.from_text(owner, records.ttl, "IN", "CNAME", f"{target}."))
        owner = f"{target}."
    addresses = [one for one in records.addresses if (":" in one) == (kind == "AAAA")]
    if addresses and kind in ("A", "AAAA"):
        response.answer.append(dns.rrset.from_text(owner, records.ttl, "IN", kind, *addresses))
