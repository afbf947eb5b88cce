"""Authorities: one normal form for each host, and no second spelling."""

from ipaddress import IPv4Address, IPv6Address

import pytest

from gateway.core.authority import Authority, AuthorityError, parse_absolute_http, parse_authority


@pytest.mark.parametrize(
    ("raw", "host"),
    [
        ("example.com", "example.com"),
        ("EXAMPLE.Com", "example.com"),
        ("example.com.", "example.com"),
        ("localhost", "localhost"),
        ("a", "a"),
        ("my_bucket.s3.example.com", "my_bucket.s3.example.com"),
        ("_acme.example.com", "_acme.example.com"),
        ("r3---sn-4g5e6nsz.example.com", "r3---sn-4g5e6nsz.example.com"),
        ("1.2.3.4.example.com", "1.2.3.4.example.com"),
        ("0x7f.example", "0x7f.example"),
        ("7zip.4pda", "7zip.4pda"),
        ("a.0xg", "a.0xg"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("bu\u0308cher.example", "xn--bcher-kva.example"),  # u and a combining diaeresis
        ("faß.example", "xn--fa-hia.example"),  # kept, as UTS #46 has it since Unicode 15.1
        ("例え.テスト", "xn--r8jz45g.xn--zckzah"),
        ("ｅｘａｍｐｌｅ．ｃｏｍ", "example.com"),
        ("example。com", "example.com"),
        ("example｡com．", "example.com"),
        ("ex\u00adample.com", "example.com"),  # a soft hyphen is nothing
        ("K.example", "k.example"),  # KELVIN SIGN
        ("a" * 63 + ".example", "a" * 63 + ".example"),
        (".".join(["a" * 49] * 5) + ".abc", ".".join(["a" * 49] * 5) + ".abc"),
    ],
)
def test_brings_a_name_into_its_normal_form(raw: str, host: str) -> None:
    assert parse_authority(f"{raw}:443".encode()) == Authority(host, 443)
    # The normal form is its own normal form.
    assert parse_authority(f"{host}:443".encode()) == Authority(host, 443)


@pytest.mark.parametrize(
    ("raw", "address"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("0.0.0.0", "0.0.0.0"),
        ("255.255.255.255", "255.255.255.255"),
        ("１９２．０．２．１", "192.0.2.1"),
        ("192。0｡2．1", "192.0.2.1"),
        ("①92.0.2.1", "192.0.2.1"),
    ],
)
def test_reads_an_ipv4_literal(raw: str, address: str) -> None:
    assert parse_authority(f"{raw}:80".encode()) == Authority(address, 80, IPv4Address(address))


@pytest.mark.parametrize(
    ("raw", "host"),
    [
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:DB8:0:0::0001]", "2001:db8::1"),
        ("[::]", "::"),
        ("[::1]", "::1"),
    ],
)
def test_reads_an_ipv6_literal_in_brackets(raw: str, host: str) -> None:
    authority = parse_authority(f"{raw}:443".encode())
    assert authority == Authority(host, 443, IPv6Address(host))
    assert str(authority) == f"[{host}]:443"


def test_reads_an_ipv6_literal_that_ends_in_an_ipv4_address() -> None:
    mapped = parse_authority(b"[::ffff:169.254.169.254]:80")
    assert mapped.address == IPv6Address("::ffff:a9fe:a9fe")


def test_an_authority_prints_as_it_is_sent() -> None:
    assert str(parse_authority(b"Example.COM.:8443")) == "example.com:8443"
    assert str(parse_authority(b"192.0.2.1:80")) == "192.0.2.1:80"


@pytest.mark.parametrize(
    "raw",
    [
        b"[[example.com]]:443",
        b"[example.com]:443",
        b"[localhost]:443",
        b"[192.0.2.1]:443",
        b"[::1:443",
        b"::1]:443",
        b"::1:443",
        b"2001:db8::1",
        b"[]:443",
        b"[::1]443",
        b"[::1]:443:443",
        b"[::1].:443",
        b"[fe80::1%eth0]:443",
        b"[fe80::1%25eth0]:443",
        b"[::1%]:443",
        b"[v1.a]:443",
        b"[1::2::3]:443",
        b"[12345::]:443",
        b"[::127.1]:443",
        b"[::0177.0.0.1]:443",
        b"[:::]:443",
        b" [::1]:443",
        b"example.com:+443",
        b"example.com:-443",
        b"example.com:443/x",
        b"example.com:443?",
        b"example.com:443#",
        b"example.com:0",
        b"example.com:00443",
        b"example.com:0443",
        b"example.com:65536",
        b"example.com:99999",
        b"example.com:123456",
        b"example.com:",
        b"example.com: 443",
        b"example.com :443",
        b"example.com:443 ",
        b"example.com:443\n",
        b"example.com:4\xef\xbc\x943",  # full-width four
        b"example.com\xef\xbc\x9a443",  # full-width colon
        b"example.com:0x1bb",
        b"example.com:1_0",
        b"example.com:https",
        b"example.com:443:443",
        b"example.com",
        b":443",
        b":",
        b"",
        b".:443",
        b"..:443",
        b"example.com..:443",
        b".example.com:443",
        b"example..com:443",
        b"example\xe3\x80\x82.com:443",
        b"user@example.com:443",
        b"user:pass@example.com:443",
        b"example.com:443@evil.example:443",
        b"@example.com:443",
        b"example.com\\:443",
        b"example.com/:443",
        b"example.com%2e:443",
        b"exa%6dple.com:443",
        b"exa mple.com:443",
        b"exa\x00mple.com:443",
        b"exa\rmple.com:443",
        b"exa\tmple.com:443",
        b"*.example.com:443",
        b"exa*mple.com:443",
        b"-example.com:443",
        b"example-.com:443",
        b"a.-.com:443",
        b"example.com,evil.example:443",
        b"example.com;:443",
        b"a" * 64 + b".example:443",
        b".".join([b"a" * 49] * 5) + b".abcd:443",
        b"a" * 2000 + b":443",
        b"\xff\xfe.example:443",
        b"\xed\xa0\x80.example:443",  # a surrogate
        "\u2488example.com:443".encode(),  # DIGIT ONE FULL STOP
        "exa\u202emple.com:443".encode(),  # RIGHT-TO-LEFT OVERRIDE
        "\u200d.example:443".encode(),  # a joiner with nothing to join
        "☃.example:443".encode(),  # no letter or digit (RFC 5892)
        "a\u2044b.example:443".encode(),  # FRACTION SLASH
        "a\uff0fb.example:443".encode(),  # FULLWIDTH SOLIDUS
        "\uff20example.com:443".encode(),  # FULLWIDTH COMMERCIAL AT
        "\u00ad.example:443".encode(),  # nothing but a soft hyphen
        ("ü" * 63 + ".example:443").encode(),  # too long once encoded
        b"xn--.example:443",
        b"xn--a.example:443",
        b"xn--example-.com:443",
        b"xn--n3h.example:443",  # the snowman again
        b"xn--bcher-kva8445foa.example:443",
        b"xn--BCHER-KV.example:443",
        b"xn--" + b"9" * 59 + b".example:443",
    ],
)
def test_refuses_everything_that_has_a_second_reading(raw: bytes) -> None:
    with pytest.raises(AuthorityError) as caught:
        parse_authority(raw)
    assert caught.value.message


@pytest.mark.parametrize(
    "host",
    [
        "127.1",
        "127.0.1",
        "2130706433",
        "0",
        "0x7f.1",
        "0x7f000001",
        "0X7F.0.0.1",
        "0x",
        "017700000001",
        "0177.0.0.1",
        "127.0.0.01",
        "127.0.0.1.",
        "127.0.0.1..",
        "1.2.3.4.5",
        "256.0.0.1",
        "1.2.3",
        "1.2.3.4.0x",
        "example.1",
        "example.0x7f",
        "１２７．１",
        "127。1",
        "⑫7.1",
    ],
)
def test_refuses_odd_spellings_of_ipv4_addresses(host: str) -> None:
    with pytest.raises(AuthorityError, match=r"IPv4|empty label"):
        parse_authority(f"{host}:80".encode())


def test_says_what_is_wrong() -> None:
    with pytest.raises(AuthorityError, match="port is missing"):
        parse_authority(b"example.com")
    with pytest.raises(AuthorityError, match="port is missing"):
        parse_authority(b"[::1]")
    with pytest.raises(AuthorityError, match="credentials"):
        parse_authority(b"user@example.com:443")


def test_the_default_port_stands_in_for_a_missing_one_only() -> None:
    assert parse_authority(b"example.com", 80) == Authority("example.com", 80)
    assert parse_authority("bücher.example".encode(), 80).port == 80
    assert parse_authority(b"[::1]", 80).port == 80
    assert parse_authority(b"192.0.2.1", 80).port == 80
    assert parse_authority(b"example.com:8080", 80) == Authority("example.com", 8080)
    with pytest.raises(AuthorityError):
        parse_authority(b"example.com:", 80)


@pytest.mark.parametrize(
    ("target", "authority", "path"),
    [
        (b"http://example.com/a?b", "example.com:80", b"/a?b"),
        (b"http://example.com", "example.com:80", b"/"),
        (b"http://example.com?q=1", "example.com:80", b"/?q=1"),
        (b"HTTP://Example.COM:8080/A", "example.com:8080", b"/A"),
        (b"http://[2001:db8::1]:81/", "[2001:db8::1]:81", b"/"),
        (b"http://192.0.2.1/http://other.example/", "192.0.2.1:80", b"/http://other.example/"),
        (b"http://example.com//evil.example/", "example.com:80", b"//evil.example/"),
        (b"http://example.com/a@b:c", "example.com:80", b"/a@b:c"),
    ],
)
def test_splits_an_absolute_http_target(target: bytes, authority: str, path: bytes) -> None:
    found, rest = parse_absolute_http(target)
    assert (str(found), rest) == (authority, path)


@pytest.mark.parametrize(
    "target",
    [
        b"/path",
        b"*",
        b"example.com:443",
        b"example.com/",
        b"https://example.com/",
        b"ftp://example.com/",
        b"ws://example.com/",
        b"http:/example.com/",
        b"http:example.com",
        b"http:///path",
        b"http://",
        b"http://:80/",
        b"http://user@example.com/",
        b"http://user:pass@example.com/",
        b"http://good.example\\@evil.example/",
        b"http://example.com\\/",
        b"http://example.com:/",
        b"http://example.com:80:80/",
        b"http://example.com/#top",
        b"http://example.com#@evil.example/",
        b"http://[::1/",
        b"http://127.1/",
        b"",
    ],
)
def test_refuses_targets_that_are_no_plain_http_address(target: bytes) -> None:
    with pytest.raises(AuthorityError):
        parse_absolute_http(target)
