"""`logs`, `egress`, `events`, `exec`: what a session says, on a terminal or for a program."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from control.api.types import RunCompleted, RunOutput, RunRequest
from control.cli.output import EXIT_HOST, as_json, cell, fail, show, table
from control.cli.run import PATIENCE_S, StreamWriter
from control.cli.text import Escaper, escape_line
from control.client import ControlClient, ControlUnavailableError
from control.runner.messages import Encoding, Stream, decode_data


async def show_logs(
    client: ControlClient,
    session: str,
    streams: Sequence[str],
    follow: bool,
    timestamps: bool,
    raw: bool,
    json: bool,
) -> None:
    """Print a session's output."""
    if timestamps or json:
        async for line in client.follow_logs(session, PATIENCE_S) if follow else client.logs(session):
            if line.stream.value not in streams:
                continue
            if json:
                as_json(line)
                continue
            text = Escaper().feed(_bytes(line.data, line.encoding), final=True)
            for row in text.splitlines():
                print(f"{escape_line(line.at)} {line.stream} {row}")
        return

    async def copy(stream: str) -> None:
        writer = StreamWriter(sys.stdout if stream == "stdout" else sys.stderr, raw=raw)
        async for data in client.follow_log(session, stream, PATIENCE_S) if follow else client.log(session, stream):
            writer.write(data)
        writer.close()

    if follow:
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(copy(stream))
    else:
        for stream in streams:
            await copy(stream)


async def show_egress(client: ControlClient, session: str, follow: bool, refused: bool, json: bool) -> None:
    """Print the gateway's decisions, refusals in red."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    async for entry in client.follow_egress(session, PATIENCE_S) if follow else client.egress(session):
        if refused and entry.get("event") != "refuse":
            continue
        if json:
            as_json(entry)
            continue
        at, event, kind = (escape_line(str(entry.get(name, ""))) for name in ("ts", "event", "kind"))
        host = escape_line(f"{entry.get('host') or '-'}:{entry.get('port') or '-'}")
        line = Text(f"{at:24} {event:7} {kind:8} {host}")
        if event == "close":
            line.append(escape_line(f"  ↑{entry.get('bytes_up', 0)} ↓{entry.get('bytes_down', 0)} bytes"))
        if entry.get("reason"):
            line.append(f"  {escape_line(str(entry['reason']))}")
        if event == "refuse":
            line.stylize("bold red")
        console.print(line)


@dataclass(slots=True)
class _Tally:
    """What became of one host."""

    allowed: int = 0
    refused: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    reasons: set[str] = field(default_factory=set)


async def summarize_egress(client: ControlClient, session: str, follow: bool, json: bool) -> None:
    """Print one line for each host, the refused ones first."""
    hosts: dict[tuple[str, int], _Tally] = {}
    async for entry in client.follow_egress(session, PATIENCE_S) if follow else client.egress(session):
        tally = hosts.setdefault((str(entry.get("host") or "-"), _number(entry, "port")), _Tally())
        match entry.get("event"):
            case "allow":
                tally.allowed += 1
            case "refuse":
                tally.refused += 1
                tally.reasons.add(str(entry.get("reason", "")))
            case "close":
                tally.bytes_up += _number(entry, "bytes_up")
                tally.bytes_down += _number(entry, "bytes_down")
    rows = sorted(hosts.items(), key=lambda item: (-item[1].refused, item[0]))
    if json:
        for (host, port), tally in rows:
            as_json({"host": host, "port": port, **asdict(tally), "reasons": sorted(tally.reasons)})
        return
    made = table("HOST", "ALLOWED", "REFUSED", "UP", "DOWN", "WHY REFUSED")
    for (host, port), tally in rows:
        counts = (tally.allowed, tally.refused, tally.bytes_up, tally.bytes_down)
        made.add_row(
            cell(f"{host}:{port}" if port else host),
            *map(str, counts),
            cell(", ".join(sorted(tally.reasons))),
            style="red" if tally.refused else None,
        )
    show(made)


def _number(entry: dict[str, Any], name: str) -> int:
    """Return a number of an entry. The gateway writes them; what is none, is 0."""
    found = entry.get(name)
    return found if isinstance(found, int) else 0


async def show_events(client: ControlClient, session: str, follow: bool, json: bool) -> None:
    """Print what happened to a session."""
    async for event in client.follow_events(session, PATIENCE_S) if follow else client.events(session, follow=False):
        if json:
            as_json(event)
            continue
        fields = msgspec.json.decode(msgspec.json.encode(event.event), type=dict[str, msgspec.Raw])
        kind = event.event.__struct_config__.tag
        detail = " ".join(f"{name}={bytes(value).decode()}" for name, value in fields.items() if name != "type")
        print(escape_line(f"{event.at} {kind} {detail}").rstrip())


def _bytes(data: str, encoding: Encoding) -> bytes:
    """Return what a piece of output holds. Raises ControlUnavailableError."""
    try:
        return decode_data(data, encoding)
    except ValueError as error:
        raise ControlUnavailableError(f"the answer is not of this version of the API: {error}") from error


async def run_command(client: ControlClient, session: str, command: RunRequest, raw: bool, json: bool) -> int:
    """Run a command in a session, its outputs apart; return its exit code."""
    writers = {
        Stream.STDOUT: StreamWriter(sys.stdout, raw=raw),
        Stream.STDERR: StreamWriter(sys.stderr, raw=raw),
    }
    code = EXIT_HOST
    async for line in client.run(session, command):
        match line:
            case RunOutput() if json:
                as_json(line)
            case RunOutput(stream, data, encoding):
                writers[stream].write(_bytes(data, encoding))
            case RunCompleted():
                code = 124 if line.timed_out else line.exit_code
                if json:
                    as_json(line)
            case _:
                fail(f"the command's end is not known: {line.message}", EXIT_HOST)
    for writer in writers.values():
        writer.close()
    return code
