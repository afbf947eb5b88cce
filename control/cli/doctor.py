"""`opificia doctor`: everything that must be in place and everything that must be impossible, each failure with its remedy."""

import asyncio
import os
import time
from pathlib import Path
from typing import Final

from control.api.types import Health
from control.cli.output import as_json, cell, show, table
from control.client import DEFAULT_ADDRESS, ControlClient, ControlError, ControlUnavailableError
from control.config import ControlConfig, load_config
from control.docker.service import DockerService
from control.docker.types import EngineError
from control.doctor.datagrams import DatagramPort
from control.doctor.findings import Finding
from control.doctor.host import (
    addresses,
    datagram_ports,
    host_findings,
    image_findings,
    listener,
    listening_ports,
    model_key,
    registry,
)
from control.doctor.trial import Subject, try_sandbox
from gateway.runtime.settings import SettingsError

# Longer than control takes to find the gateway again, and to look at the firewall again.
_SETTLE_S: Final = 6.0
_SETTLE_STEP_S: Final = 0.2


def examine(config: Path, gateway_config: Path, image: str, *, sandbox: bool, json: bool) -> int:
    """Print all findings; return 0 when everything is well, 1 otherwise. `sandbox`: also try one from inside."""
    findings = asyncio.run(_findings(config, gateway_config, image, sandbox))
    if json:
        as_json(findings)
    else:
        made = table("", "CHECK", "FINDING", "REMEDY")
        for each in findings:
            mark = "[green]✓[/green]" if each.ok else "[red]✗[/red]"
            made.add_row(mark, cell(each.check), cell(each.detail), cell(each.remedy))
        show(made)
    return 0 if all(each.ok for each in findings) else 1


async def _findings(path: Path, gateway_config: Path, image: str, sandbox: bool) -> list[Finding]:
    address = os.environ.get("OPIFICIA_CONTROL", DEFAULT_ADDRESS)
    findings = [_socket(address)] if address.startswith("unix:") else []
    config, problem = _config(path)
    findings += problem
    try:
        async with ControlClient(address, os.environ.get("OPIFICIA_CONTROL_TOKEN", "")) as client:
            health = await _settled(client)
            findings += await asyncio.to_thread(host_findings, health, config.data if config else None)
            if config is not None and os.access(config.docker.socket, os.W_OK):
                findings += await _images(config)
            if sandbox:
                settings = config or ControlConfig()
                with listener(), DatagramPort() as datagrams:
                    subject = Subject(
                        image=image or settings.images.sandbox,
                        addresses=(*addresses(), str(settings.network.bridge_address)),
                        ports=listening_ports(),
                        out_bytes=settings.limits.out_bytes,
                        registry=registry(gateway_config),
                        key=model_key(gateway_config),
                        udp_ports=datagram_ports(),
                        heard_datagram=lambda: bool(datagrams.heard),
                    )
                    findings += await try_sandbox(client, subject)
    except (ControlError, ControlUnavailableError) as error:
        remedy = "systemctl status opificia-control; its log says why it does not run"
        findings.append(Finding("host", "control daemon", False, str(error), remedy))
    return findings


async def _settled(client: ControlClient) -> Health:
    """Return how the host is; what is wrong with it has a moment to pass, for a daemon may just have been started."""
    until = time.monotonic() + _SETTLE_S
    while (health := await client.health()).problems and time.monotonic() < until:  # noqa: ASYNC110 - another process's
        await asyncio.sleep(_SETTLE_STEP_S)
    return health


async def _images(config: ControlConfig) -> list[Finding]:
    """Look at our images, where this user may ask the engine itself."""
    wanted = {config.images.sandbox, config.images.forwarder, config.images.helper}
    engine = DockerService(config.docker, "", limits=config.limits, sandbox=config.sandbox)
    try:
        found = await engine.images.listing()
    except EngineError as error:
        return [Finding("host", "images", False, error.message, error.remedy or "systemctl status docker")]
    finally:
        await engine.close()
    ages = {tag: image.created_at for image in found for tag in image.tags if tag in wanted}
    missing = [
        Finding("host", f"image {name}", False, "the engine does not have it", "opificia images build")
        for name in sorted(wanted - ages.keys())
    ]
    return [*missing, *image_findings(sorted(ages.items()), time.time())]


def _config(path: Path) -> tuple[ControlConfig | None, list[Finding]]:
    """Read control.toml where this user may: an operator need not be able to."""
    if not os.access(path, os.R_OK):
        return None, []
    try:
        return load_config(path), [Finding("host", "control.toml", True, str(path))]
    except SettingsError as error:
        remedy = "opificia-control --check-config lists every problem"
        return None, [Finding("host", "control.toml", False, str(error.problems[0]), remedy)]


def _socket(address: str) -> Finding:
    path = Path(address.removeprefix("unix:"))
    if not path.exists():
        remedy = "start opificia-control, or set OPIFICIA_CONTROL"
        return Finding("host", "API socket", False, f"{path} is not there", remedy)
    if not os.access(path, os.W_OK):
        remedy = f"join the group {path.group()}, log in again"
        return Finding("host", "API socket", False, f"{path} may not be used", remedy)
    return Finding("host", "API socket", True, str(path))
