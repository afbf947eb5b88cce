"""A name server for benchmarks: every A question has one answer, so that the gateway resolves and caches a real name."""

import socket
import struct
import threading
from typing import Final

import dns.flags
import dns.message
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

ZONE: Final = "bench.example"
TTL_S: Final = 300


class NameServer:
    """Answers on a UDP port of 127.0.0.1. `addresses` are the names' IPv4 addresses; any other name does not exist."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self._addresses = {f"{name}.": address for name, address in addresses.items()}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, name="names", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            data, sender = self._socket.recvfrom(4096)
            if not data:
                return
            try:
                self._socket.sendto(self._answer(data), sender)
            except (dns.exception.DNSException, struct.error):
                continue

    def _answer(self, data: bytes) -> bytes:
        query = dns.message.from_wire(data)
        question = query.question[0]
        reply = dns.message.make_response(query)
        reply.flags |= dns.flags.AA | dns.flags.RA
        address = self._addresses.get(str(question.name).lower())
        if address is None:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        elif question.rdtype == dns.rdatatype.A:
            reply.answer.append(dns.rrset.from_text(question.name, TTL_S, dns.rdataclass.IN, "A", address))
        return reply.to_wire()

    def close(self) -> None:
        """Stop."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            host, _, port = self.address.rpartition(":")
            waker.sendto(b"", (host, int(port)))
        self._thread.join()
        self._socket.close()


def client_hello(server_name: str) -> bytes:
    """Return the first record that OpenSSL sends to `server_name`."""
    import ssl

    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=server_name)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()
