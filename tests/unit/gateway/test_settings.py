"""Settings: every problem at once, each with its key and line."""

from pathlib import Path

import msgspec
import pytest

from gateway.config import GatewayConfig, SessionsFile, load_config, load_sessions
from gateway.runtime.settings import SettingsError, load, parse
from tests.support.paths import CHECKOUT

BAD_GATEWAY = """\
[listen]
sandbox = "nowhere"
proxy_protocol = "yes"
colour = "red"

[egress]
denied_networks = ["10.0.0.0/8", "10.0.0.1/8"]
nameservers = ["dns.example"]

[[egress.trusted]]
hosts = ["*.mirror.example"]
ports = [443]
network = "10.20.0.0/16"

[[egress.trusted]]
hosts = ["bad host"]
ports = [0]
network = "x"

[limits]
egress_idle_ms = -1.5
"""


def problems_of(text: str, kind: type[msgspec.Struct]) -> list[str]:
    with pytest.raises(SettingsError) as error:
        parse(text, kind)
    return [str(problem) for problem in error.value.problems]


def test_reports_every_problem_with_key_and_line() -> None:
    problems = problems_of(BAD_GATEWAY, GatewayConfig)
    starts = [problem.split(": ")[:2] for problem in problems]
    assert ["line 3", "listen.proxy_protocol"] in starts
    assert ["line 4", "listen.colour"] in starts
    assert ["line 7", "egress.denied_networks"] in starts
    assert ["line 8", "egress.nameservers"] in starts
    assert ["line 16", "egress.trusted[1].hosts"] in starts
    assert ["line 17", "egress.trusted[1].ports"] in starts
    assert ["line 18", "egress.trusted[1].network"] in starts
    assert ["line 21", "limits.egress_idle_ms"] in starts


def test_a_setting_that_checks_itself_is_reported_beside_the_others() -> None:
    problems = problems_of('[listen]\nsandbox = "nowhere"\nmetrics = "x"\n', GatewayConfig)
    assert [problem.split(": ")[1] for problem in problems] == ["listen.sandbox", "listen.metrics"]


def test_a_gateway_that_could_never_let_anyone_in_is_refused() -> None:
    assert "neither [sessions] file nor [listen] contract" in problems_of("", GatewayConfig)[0]


def test_sessions_report_every_problem() -> None:
    text = '[[session]]\nid = "A"\n\n[[session]]\nid = "b"\ntoken = "t"\nallow = ["*"]\nnetwork = "wide"\n'
    problems = problems_of(text, SessionsFile)
    assert {tuple(problem.split(": ")[:2]) for problem in problems} == {
        ("line 2", "session[0].id"),
        ("line 1", "session[0].token"),
        ("line 7", "session[1].allow"),
        ("line 8", "session[1].network"),
    }


BAD_SESSIONS = """\
[[session]]
id = "a"
token_sha256 = "zz"
address = "10.0.0.1"
egress_budget = { bytes = -5, connections = 0 }

[[session]]
id = "b"
token = "a token"
address = "10.0.0.2"
model_budget = { requests_per_minute = -1 }
"""


def test_a_session_that_could_never_be_used_is_a_problem() -> None:
    problems = problems_of(BAD_SESSIONS, SessionsFile)
    assert [tuple(problem.split(": ")[:2]) for problem in problems] == [
        ("line 3", "session[0].token_sha256"),
        ("line 5", "session[0].egress_budget.bytes"),
        ("line 5", "session[0].egress_budget.connections"),
        ("line 9", "session[1].token"),
        ("line 11", "session[1].model_budget.requests_per_minute"),
    ]


def test_two_sessions_never_share_a_name_or_an_address() -> None:
    text = "".join(f'[[session]]\nid = "a"\ntoken = "t"\naddress = "{address}"\n' for address in ("::1", "0::1"))
    assert problems_of(text, SessionsFile) == [
        "session: 'a' is there twice",
        "session: address ::1 is given to two sessions",
    ]


def test_what_is_missing_is_named() -> None:
    assert problems_of("[[session]]\n", SessionsFile) == ["line 1: session[0].id: is missing"]


@pytest.mark.parametrize("text", ["[listen", "a = = 1", "[listen]\n[listen]\n"])
def test_what_is_not_toml_is_one_problem(text: str) -> None:
    assert "is not TOML" in problems_of(text, GatewayConfig)[0]


def test_a_file_that_is_missing_or_not_text_is_one_problem(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        load(tmp_path / "none.toml", GatewayConfig)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="is not UTF-8: byte 0"):
        load(tmp_path / "bytes.toml", GatewayConfig)


def test_the_files_that_the_documentation_shows_can_be_used(tmp_path: Path) -> None:
    text = (CHECKOUT / "docs/configuration.md").read_text()
    for name in ("gateway", "sessions"):
        example = text.split(f"## {name}.toml")[1].split("```toml\n")[1].split("```")[0]
        (tmp_path / f"{name}.toml").write_text(example)
    assert load_config(tmp_path / "gateway.toml").sessions.file == "sessions.toml"
    (session,) = load_sessions(tmp_path / "sessions.toml")
    assert session.model_budget.requests_per_minute == 60
