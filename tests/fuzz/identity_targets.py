"""Targets about who asks and for what: a CONNECT's credentials, a runner's upgrade, rules, DNS answers, the operator's key."""

import ipaddress
import os

import dns.exception
import dns.message
import dns.name
import dns.rdataclass
import dns.rdatatype
import dns.resolver

from gateway.contract.ids import is_session_id
from gateway.contract.policy import NetworkLevel
from gateway.core.address import address_class
from gateway.core.authority import Authority, parse_authority
from gateway.core.connect_request import ConnectRequest, read_connect
from gateway.core.credentials import parse_basic, parse_bearer
from gateway.core.decide import HostFacts, decide_addresses
from gateway.core.head import Head, HeadError, parse_head
from gateway.core.incomplete import Incomplete
from gateway.core.replies import refusal_of
from gateway.core.rules import HostRule, Policy, RegistryList, RuleError, RuleErrors, RuleTable, load_registries
from gateway.core.verdict import Allow
from gateway.credentials import ModelKey, ModelKeyError
from gateway.net.resolve import MAX_ADDRESSES, Found, Resolved, found_in, put_together
from gateway.net.runner import read_upgrade, upgrade_head
from tests.fuzz.properties import check_bounded, check_message

_POLICY = Policy.compile(NetworkLevel.OPEN, [], [], RegistryList())
_NAME = "a.example"


def connect_request(data: bytes) -> None:
    """`read_connect`: one host and one session, or a refusal that holds nothing of the credentials."""
    parse_bearer(data)
    parse_basic(data)
    try:
        head = parse_head(data)
    except HeadError:
        return
    if isinstance(head, Incomplete):
        return
    asked = read_connect(head)
    if isinstance(asked, ConnectRequest):
        assert is_session_id(asked.session_id)
        assert asked.authority == parse_authority(head.target)
        assert parse_basic(head.get_all(b"proxy-authorization")[0]) == (asked.session_id, asked.token)
        assert asked.token.isascii()
        hosts = head.get_all(b"host")
        # The same twice names no other host.
        assert len(set(hosts)) <= 1
        if hosts and hosts[0]:
            assert parse_authority(hosts[0], asked.authority.port).host == asked.authority.host
        return
    check_message(asked.deny.message)
    told = refusal_of(asked.deny, asked.authority)
    reply_head, _, body = told.partition(b"\r\n\r\n")
    assert b"\r\nContent-Length: %d\r\n" % len(body) in reply_head
    for value in head.get_all(b"proxy-authorization"):
        secret = value.partition(b" ")[2].strip()
        assert len(secret) < 16 or secret not in told


def runner_upgrade(data: bytes) -> None:
    """`read_upgrade`, `upgrade_head`: control gets one head with the session's id, and nothing of the sandbox's own."""
    try:
        head = parse_head(data)
        if isinstance(head, Incomplete):
            return
        asked = read_upgrade(head, head.target)
    except HeadError as error:
        check_message(error.message)
        return
    assert not asked.session_id or is_session_id(asked.session_id)
    assert not asked.session_id or head.target == b"/runner?session=" + asked.session_id.encode()
    assert asked.token is None or asked.token.isascii()
    if not (asked.session_id and asked.key):
        return
    assert head.method == b"GET"
    passed = parse_head(upgrade_head(asked.session_id, asked.key))
    assert isinstance(passed, Head)
    assert passed.size == len(upgrade_head(asked.session_id, asked.key))
    assert passed.target == b"/runner"
    assert passed.get_all(b"x-opificia-session") == [asked.session_id.encode()]
    assert passed.get_all(b"sec-websocket-key") == [asked.key]
    assert not passed.get_all(b"authorization")
    assert len(passed.headers) == 6


def rule(data: bytes) -> None:
    """`HostRule.parse`, `RuleTable`: a rule says again what it was read from, and the table finds what the rule covers."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        found = HostRule.parse(text)
    except RuleError as error:
        check_bounded(str(error), data)
        return
    again = HostRule.parse(str(found))
    assert again == found
    assert str(found).isascii()
    assert not (found.wildcard and found.address is not None)
    table = RuleTable([(found, Allow("it"))])
    port = found.port or 443
    inside = Authority(f"x.{found.host}" if found.wildcard else found.host, port, found.address)
    for host in (inside.host, found.host, f"x{found.host}", f"{found.host}.x", f"y.x.{found.host}"):
        for other in {port, 1}:
            asked = Authority(host, other, found.address)
            assert (table.find(asked) is not None) == found.matches(asked)
    assert found.matches(inside)
    assert not HostRule(found.host, wildcard=True).matches(Authority(found.host, port))


def registries(data: bytes) -> None:
    """`load_registries`: a list whose every host is found with every one of its ports, or every problem, a sentence each."""
    try:
        found = load_registries(data.decode("utf-8", "replace"))
    except RuleErrors as error:
        check_bounded(str(error), data * 10)
        for problem in error.problems:
            check_bounded(problem, data)
        return
    assert len({registry.name for registry in found.registries}) == len(found.registries) > 0
    for registry in found.registries:
        for host in registry.hosts:
            for port in registry.ports:
                name = f"x.{host.host}" if host.wildcard else host.host
                assert found.table.find(Authority(name, port, host.address)) is not None


def _family(raw: bytes, kind: dns.rdatatype.RdataType) -> Found | Exception:
    """Read an answer as dnspython's resolver does: whatever it raises is no answer."""
    try:
        message = dns.message.from_wire(raw)
        query = dns.message.make_query(_NAME, kind, id=message.id)
        if not query.is_response(message):
            raise ValueError
        answer = dns.resolver.Answer(dns.name.from_text(_NAME), kind, dns.rdataclass.IN, message)
    except Exception as error:
        return error
    try:
        found, ttl = found_in(answer)
    except ValueError as error:
        return error
    assert 0 <= ttl < 1 << 31
    assert all(address.version == (4 if kind == dns.rdatatype.A else 6) for address in found)
    # Nothing is invented: each is in the message, as a record of this kind.
    records = {
        item.address
        for group in message.answer
        if (group.rdtype, group.rdclass) == (kind, dns.rdataclass.IN)
        for item in group
    }
    assert {str(address) for address in found} <= {str(ipaddress.ip_address(record)) for record in records}
    return found, ttl


def dns_answer(data: bytes) -> None:
    """`found_in`, `put_together`: no more addresses than are judged, each of them, and an error is told without them.

    Two answers, one for each family; the first two bytes say where the second begins.
    """
    cut = int.from_bytes(data[:2], "big")
    four = _family(data[2 : 2 + cut], dns.rdatatype.A)
    six = _family(data[2 + cut :], dns.rdatatype.AAAA)
    answer, ttl = put_together(_NAME, four, six)
    assert ttl >= 0
    if not isinstance(answer, Resolved):
        check_message(answer.message)
        assert _NAME in answer.message
        return
    assert 0 < len(answer.addresses) <= MAX_ADDRESSES
    verdict = decide_addresses(_POLICY, Authority(_NAME, 443), answer.addresses, HostFacts())
    assert isinstance(verdict, Allow) == (not any(address_class(address) for address in answer.addresses))


def model_key(data: bytes) -> None:
    """`ModelKey`: one line of printable characters, or an error that does not hold it."""
    memory = os.memfd_create("key", os.MFD_CLOEXEC)
    try:
        os.fchmod(memory, 0o600)
        os.write(memory, data)
        try:
            key = ModelKey(f"/proc/self/fd/{memory}")
        except ModelKeyError as error:
            refused = str(error)
            check_bounded(refused, b"")
        else:
            refused = ""
        secret = data.strip()
        if refused:
            assert len(secret) < 16 or secret not in refused.encode()
            return
        assert key() == secret
        assert key().isascii()
        assert key().decode().isprintable()
        assert b" " not in key()
        assert len(secret) < 16 or key().decode() not in repr(key)
    finally:
        os.close(memory)


IDENTITY_TARGETS = {
    "connect_request": connect_request,
    "runner_upgrade": runner_upgrade,
    "rule": rule,
    "registries": registries,
    "dns_answer": dns_answer,
    "model_key": model_key,
}
