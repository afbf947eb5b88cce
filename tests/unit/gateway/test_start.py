"""A gateway that cannot start says why in one sentence with the remedy; a wrong configuration is status 78 with every problem."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway_process import toml


def gateway(folder: Path, tables: dict[str, Any], *options: str) -> tuple[int, list[str]]:
    """Run a gateway that must end by itself; return its status and what it said."""
    (folder / "sessions.toml").write_text('[[session]]\nid = "s1"\ntoken = "t"\n')
    config = folder / "gateway.toml"
    whole = {"listen": {"sandbox": "127.0.0.1:0"}, "sessions": {"file": str(folder / "sessions.toml")}, **tables}
    config.write_text(toml(whole))
    argv = [sys.executable, "-m", "gateway", "--config", str(config), *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"audit": {"dir": "/nonexistent/log"}}, ("[audit] dir", "make it")),
        ({"model": {"api_key_file": "/nonexistent/key"}}, ("model key", "put the key there")),
        ({"listen": {"sandbox": "unix:/nonexistent/a.sock"}}, ("No such file", "make its folder")),
        ({"listen": {"sandbox": "192.0.2.1:8900"}}, ("192.0.2.1", "change it under [listen]")),
        ({"egress": {"registries_file": "/nonexistent/list"}}, ("registries_file", "No such file")),
    ],
)
def test_what_is_missing_is_one_sentence_with_the_remedy(
    tmp_path: Path, tables: dict[str, Any], words: tuple[str, ...]
) -> None:
    status, said = gateway(tmp_path, tables)
    assert status == 1
    (line,) = said
    assert all(word in line for word in words), line


def test_a_port_in_use_is_one_sentence_with_the_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = gateway(tmp_path, {"listen": {"sandbox": f"127.0.0.1:{port}"}})
    assert status == 1
    assert "stop what uses it" in said[-1]


def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    """connect(2) refuses it as it refuses a socket that nobody listens on."""
    file = tmp_path / "sandbox.sock"
    file.write_text("somebody's")
    status, said = gateway(tmp_path, {"listen": {"sandbox": f"unix:{file}"}})
    assert status == 1
    assert "no socket" in said[-1]
    assert file.read_text() == "somebody's"


def test_a_wrong_configuration_is_status_78_with_every_problem(tmp_path: Path) -> None:
    bad = {
        "listen": {"sandbox": "127.0.0.1:0", "contract": "127.0.0.1:1"},
        "egress": {"trusted": [{"hosts": [], "ports": [], "network": "10.0.0.0/8"}]},
        "limits": {"egress_idle_ms": 0, "head_bytes": -1, "drain_ms": 0},
    }
    status, said = gateway(tmp_path, bad, "--check-config")
    assert status == 78
    keys = [line.split(": ")[2] for line in said]
    assert keys == [
        "listen.contract", "egress.trusted[0].hosts", "egress.trusted[0].ports", "limits.egress_idle_ms", "limits.head_bytes",
    ]  # fmt: skip
