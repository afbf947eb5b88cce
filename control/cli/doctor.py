"""`opificia doctor`: what must be in place, checked one by one, each failure with its remedy."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from control.cli.output import as_json, cell, show, table
from control.client import DEFAULT_ADDRESS, ControlClient, ControlError, ControlUnavailableError


class Finding(msgspec.Struct, frozen=True):
    """One check: what was looked at, whether it is well, and what to do if it is not."""

    check: str
    ok: bool
    detail: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class _Subject:
    address: str
    token: str


def examine(json: bool) -> int:
    """Print all findings; return 0 when everything is well, 1 otherwise."""
    subject = _Subject(
        os.environ.get("OPIFICIA_CONTROL", DEFAULT_ADDRESS), os.environ.get("OPIFICIA_CONTROL_TOKEN", "")
    )
    findings = asyncio.run(_findings(subject))
    if json:
        as_json(findings)
    else:
        made = table("", "CHECK", "FINDING", "REMEDY")
        for each in findings:
            mark = "[green]✓[/green]" if each.ok else "[red]✗[/red]"
            made.add_row(mark, cell(each.check), cell(each.detail), cell(each.remedy))
        show(made)
    return 0 if all(each.ok for each in findings) else 1


async def _findings(subject: _Subject) -> list[Finding]:
    findings = [_socket(subject.address)] if subject.address.startswith("unix:") else []
    try:
        async with ControlClient(subject.address, subject.token) as client:
            health = await client.health()
    except (ControlError, ControlUnavailableError) as error:
        remedy = "systemctl status opificia-control; its log says why it does not run"
        return [*findings, Finding("control daemon", False, str(error), remedy)]
    detail = f"version {health.version}, host {health.host_id}, {health.running} running, {health.waiting} waiting"
    findings.append(Finding("control daemon", True, detail))
    for problem in health.problems:
        what, _, remedy = problem.partition("; ")
        findings.append(Finding("host", False, what, remedy))
    if not health.problems:
        findings.append(Finding("host", True, "engine, network, forwarder, gateway and database are there"))
    return findings


def _socket(address: str) -> Finding:
    path = Path(address.removeprefix("unix:"))
    if not path.exists():
        return Finding("API socket", False, f"{path} is not there", "start opificia-control, or set OPIFICIA_CONTROL")
    if not os.access(path, os.W_OK):
        return Finding("API socket", False, f"{path} may not be used", f"join the group {path.group()}, log in again")
    return Finding("API socket", True, str(path))
