"""SIGHUP when something cannot be read: the rest is read all the same, each fault is told, and the manager hears READY."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from gateway import app as app_module
from gateway.app import App
from gateway.config import GatewayConfig, ListenSettings, ModelSettings, SessionsSettings
from gateway.core.providers import ProviderSettings
from gateway.net.services import Services


def write_key(file: Path, key: str) -> str:
    file.write_text(key)
    file.chmod(0o600)
    return str(file)


def running(folder: Path) -> App:
    """Return a gateway with three further providers, each with a key of its own."""
    providers = tuple(
        ProviderSettings(name=name, upstream="http://127.0.0.1:9", api_key_file=write_key(folder / name, "old"))
        for name in ("a", "b", "c")
    )
    sessions = folder / "sessions.toml"
    sessions.write_text("")
    return App(
        GatewayConfig(
            listen=ListenSettings(sandbox="127.0.0.1:0"),
            sessions=SessionsSettings(file=str(sessions)),
            model=ModelSettings(upstream="http://127.0.0.1:9", provider=providers),
        )
    )


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the service manager was told."""
    found: list[str] = []
    monkeypatch.setattr(app_module, "notify_reloading", lambda: found.append("RELOADING"))
    monkeypatch.setattr(app_module, "notify", found.append)
    return found


def services() -> Services:
    return cast(Services, SimpleNamespace(resolver=SimpleNamespace(reload=lambda: None), facts="old"))


def test_every_further_key_is_read_whichever_of_them_cannot_be_and_each_fault_is_told(
    tmp_path: Path, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    app = running(tmp_path)
    (tmp_path / "a").unlink()
    (tmp_path / "b").chmod(0o644)
    write_key(tmp_path / "c", "new")
    app._reload(services())
    assert [provider.key() for provider in app.gateway.model.providers.values()] == [b"old", b"old", b"new"]
    assert f"{tmp_path}/a cannot be read" in caplog.text
    assert f"chmod 600 {tmp_path}/b" in caplog.text
    assert told == ["RELOADING", "READY=1"]


def test_a_reload_that_cannot_read_this_hosts_addresses_keeps_those_it_knows_and_says_that_it_is_ready(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError(24, "Too many open files")

    app, known = running(tmp_path), services()
    monkeypatch.setattr(app_module, "read_own_addresses", fail)
    app._reload(known)
    assert known.facts == "old"
    assert "Too many open files" in caplog.text
    assert told == ["RELOADING", "READY=1"]
