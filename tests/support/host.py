"""A whole sandbox host of its own: folders, users, engine, both daemons, as in production but under one folder.

The engine lives in namespaces of its own (`engine.py`); the daemons run outside them as unprivileged users, from a copy
of the code that every user can read (a checkout may lie under /root), and reach sandboxes only through the door.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from control.spec import SandboxSpec
from tests.support import identities
from tests.support.daemon import Daemon
from tests.support.engine import PrivateEngine
from tests.support.gateway_process import toml
from tests.support.mirrors import trusted_mirrors
from tests.support.paths import CHECKOUT, IMAGES
from tests.support.processes import spawn, stop, wait_until
from tests.support.sandbox import Sandbox, health

# The certificate authorities of a machine behind a company's mirror are named by this variable.
_CA_VARIABLE: Final = "SSL_CERT_FILE"
_CLI: Final = (sys.executable, "-m", "control.cli")
_CLI_TIMEOUT_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class Model:
    """The model provider as the operator configures it."""

    upstream: str
    key: str


@contextmanager
def stand_in_model() -> Iterator[Model]:
    """Run a fake provider as a process, with a key of the usual form made for this run."""
    key = f"sk-ant-{secrets.token_urlsafe(32)}"
    with tempfile.TemporaryFile() as output:
        # The key is an argument: it is worth nothing, and only this machine's users could read it there.
        argv = [sys.executable, "-m", "tests.support.provider", "--listen", "127.0.0.1:0", "--key", key]
        process = spawn(argv, log=output.fileno(), cwd=CHECKOUT, ends_with_us=True)
        try:
            wait_until(
                lambda: _said(output).endswith("\n"),
                "the stand-in for the model provider",
                give_up=lambda: None if process.poll() is None else _said(output),
            )
            yield Model(_said(output).split()[-1], key)
        finally:
            stop(process)


def _said(output: IO[bytes]) -> str:
    return os.pread(output.fileno(), 65536, 0).decode(errors="replace")


class PrivateHost:
    """One host, on an engine that is started. `gateway` and `control` add to or replace settings of the two files, table by table."""

    def __init__(
        self,
        engine: PrivateEngine,
        model: Model,
        *,
        gateway: Mapping[str, Mapping[str, Any]] | None = None,
        control: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.engine: Final = engine
        self.root: Final = engine.scratch / "host"
        self.root.mkdir()
        self.root.chmod(0o755)
        self.ca_bundle: Final = os.environ.get(_CA_VARIABLE, "")
        self._model = model
        self._overrides = {"gateway": gateway or {}, "control": control or {}}
        self._make_folders()
        self._copy_code()
        self._write_settings()
        self.gateway: Final = self._daemon(
            "gateway", identities.GATEWAY, (identities.RUNNER_GROUP, identities.FORWARDER)
        )
        self.control: Final = self._daemon(
            "control", identities.CONTROL, (identities.CONTRACT_GROUP, identities.ENGINE_GROUP)
        )

    @property
    def api(self) -> str:
        """The control API's address, as the CLI and the client library take it."""
        return f"unix:{self.root}/run/opificia/api/control.sock"

    @property
    def door(self) -> Path:
        """The sandbox port's socket."""
        return self.root / "run/opificia/door/sandbox.sock"

    @property
    def sessions(self) -> Path:
        """The folder with a folder for each session."""
        return self.root / "var/lib/opificia/sessions"

    @property
    def egress_logs(self) -> Path:
        """The folder with an egress log for each session."""
        return self.root / "var/log/opificia/egress"

    def start(self) -> None:
        """Build or load the images, prepare the host, start both daemons; sandboxes can be launched when this returns."""
        self.prepare()
        self.gateway.start()
        self.control.start()
        self.wait_ready()

    def prepare(self) -> list[str]:
        """Do what Ansible has `opificia images build` and `opificia host prepare` do; returns the changes."""
        config = ("--config", str(self._settings("control")))
        done = [
            self.cli("images", "build", *config, "--cache", str(IMAGES)),
            self.cli("host", "prepare", *config),
        ]
        return [line for each in done for line in each.stdout.splitlines() if line != "nothing to change"]

    def is_ready(self) -> bool:
        """Tell whether control finds nothing wrong."""
        return not health(self.api).problems

    def wait_ready(self) -> None:
        """Wait until control finds nothing wrong: it is connected to the gateway, and has looked at the firewall again.

        A daemon that was just started has not done so yet, and what a test took away and put back it may not have seen.
        """
        wait_until(self.is_ready, "a host ready for sandboxes")

    def sandbox(self, spec: SandboxSpec) -> Sandbox:
        """Wait until the host is ready, launch a session, and wait until its runner is connected."""
        self.wait_ready()
        return Sandbox.launch(self.api, self.engine, spec)

    def stop(self) -> None:
        """Stop both daemons and remove the folders. The engine is its owner's to stop."""
        try:
            self.control.stop()
            self.gateway.stop()
        finally:
            shutil.rmtree(self.root, ignore_errors=True)

    def cli(self, *arguments: str, check: bool = True, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run `opificia` as root, against this host's API. Raises AssertionError with its output."""
        done = subprocess.run(
            [*_CLI, *arguments],
            env=self._cli_environment(),
            cwd="/",
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_CLI_TIMEOUT_S,
        )
        if check and done.returncode:
            raise AssertionError(
                f"opificia {' '.join(arguments)}: status {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done

    @contextmanager
    def cli_running(self, *arguments: str, out: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run `opificia` beside the test, both outputs to a file; it is killed at the end if it still runs."""
        with out.open("wb") as file:
            process = spawn([*_CLI, *arguments], log=file, env=self._cli_environment(), cwd=Path("/"))
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _cli_environment(self) -> dict[str, str]:
        return self._environment(CHECKOUT) | {"OPIFICIA_CONTROL": self.api}

    def may_read(self, path: Path, uid: int, groups: Sequence[int]) -> bool:
        """Tell whether a user of these groups may read a file of the host, or connect to a socket."""
        user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", f"--groups={','.join(map(str, groups))}", "--"]
        # access(2) looks at modes and folders only, which is all that keeps our users apart.
        return subprocess.run([*user, "test", "-r", str(path)], cwd="/").returncode == 0

    def logs(self) -> str:
        """Return what both daemons have logged."""
        return f"--- gateway\n{self.gateway.log()}--- control\n{self.control.log()}"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _make_folders(self) -> None:
        """Make what sysusers, tmpfiles and the units make in production, with the same owners and modes."""
        for path, owner, group, mode in (
            ("run/opificia/door", identities.GATEWAY, identities.FORWARDER, 0o2750),
            ("run/opificia/contract", identities.GATEWAY, identities.CONTRACT_GROUP, 0o2750),
            ("run/opificia/runner", identities.CONTROL, identities.RUNNER_GROUP, 0o2750),
            ("run/opificia/api", identities.CONTROL, 0, 0o2750),
            ("run/notify", 0, 0, 0o755),
            ("var/lib/opificia", identities.CONTROL, identities.CONTROL, 0o750),
            ("var/log/opificia/egress", identities.GATEWAY, identities.CONTROL, 0o2750),
            ("etc", 0, 0, 0o755),
            ("log", 0, 0, 0o700),
        ):
            folder = self.root / path
            folder.mkdir(parents=True)
            os.chown(folder, owner, group)
            # After chown, which takes the set-group-ID bit away.
            folder.chmod(mode)

    def _copy_code(self) -> None:
        for program in ("gateway", "control"):
            shutil.copytree(CHECKOUT / program, self._code / program)
        for path in (self._code, *self._code.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)

    def _write_settings(self) -> None:
        base = self.root
        key_file = base / "etc/model-api-key"
        key_file.touch(mode=0o600)
        key_file.write_text(self._model.key)
        os.chown(key_file, identities.GATEWAY, identities.GATEWAY)
        run = f"unix:{base}/run/opificia"
        gateway: dict[str, Any] = {
            "listen": {
                "sandbox": f"{run}/door/sandbox.sock",
                "contract": f"{run}/contract/gateway.sock",
                "proxy_protocol": True,
            },
            "egress.trusted": list(trusted_mirrors()),
            "audit": {"dir": str(self.egress_logs)},
            "model": {"upstream": self._model.upstream, "api_key_file": str(key_file)},
            "runner": {"upstream": f"{run}/runner/control.sock"},
        }
        control: dict[str, Any] = {
            "store": {"url": f"sqlite:///{base}/var/lib/opificia/control.db"},
            "paths": {
                "data": f"{base}/var/lib/opificia",
                "egress_logs": str(self.egress_logs),
                "door": f"{base}/run/opificia/door",
            },
            "docker": {"socket": str(self.engine.socket)},
            "listen": {"api": self.api, "runner": f"{run}/runner/control.sock"},
            "gateway": {"contract": f"{run}/contract/gateway.sock"},
            "forwarder": {"user": f"{identities.FORWARDER}:{identities.FORWARDER}"},
            "sandbox": {"ca_bundle": self.ca_bundle},
        }
        for name, tables in (("gateway", gateway), ("control", control)):
            for table, values in self._overrides[name].items():
                tables[table] = {**tables.get(table, {}), **values}
            self._settings(name).write_text(toml(tables))

    def _daemon(self, name: str, uid: int, groups: Sequence[int]) -> Daemon:
        return Daemon(
            [sys.executable, "-m", name, "--config", str(self._settings(name))],
            uid=uid,
            groups=groups,
            environment=self._environment(self._code),
            log=self.root / f"log/{name}.log",
            notify=self.root / f"run/notify/{name}.sock",
        )

    def _environment(self, code: Path) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG", _CA_VARIABLE) if name in os.environ}
        return {"HOME": "/nonexistent", **kept, "PYTHONPATH": str(code), "PYTHONDONTWRITEBYTECODE": "1"}

    def _settings(self, name: str) -> Path:
        return self.root / f"etc/{name}.toml"

    @property
    def _code(self) -> Path:
        return self.root / "code"
