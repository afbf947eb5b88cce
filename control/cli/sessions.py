"""`opificia sessions`: the table, once or for as long as somebody watches."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from control.api.types import SessionPage, SessionView
from control.cli.output import as_json, cell, show, table
from control.cli.run import PATIENCE_S
from control.client import ControlClient
from control.db.rows import Selection

if TYPE_CHECKING:
    from rich.table import Table

_PAGE: Final = 500
_WATCH_S: Final = 1.0


async def show_sessions(client: ControlClient, wanted: Selection, limit: int, json: bool) -> None:
    """Print the newest sessions."""
    page = await _newest(client, wanted, limit)
    if json:
        as_json(page)
    else:
        show(_table(page.sessions))


async def watch_sessions(client: ControlClient, wanted: Selection, limit: int, json: bool) -> None:
    """Print the newest sessions again whenever they have changed, until interrupted; on a terminal in place."""
    from rich.console import Console
    from rich.live import Live

    seen = None
    console = Console(highlight=False)
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not json else None
    with live or contextlib.nullcontext():
        while True:
            page = await _newest(client, wanted, limit, PATIENCE_S)
            if page != seen:
                seen = page
                if live is not None:
                    live.update(_table(page.sessions), refresh=True)
                elif json:
                    as_json(page)
                else:
                    show(_table(page.sessions))
            await asyncio.sleep(_WATCH_S)


async def _newest(client: ControlClient, wanted: Selection, limit: int, patience_s: float = 0) -> SessionPage:
    """Return up to `limit` sessions as one page, in as many requests as that takes."""
    found: list[SessionView] = []
    cursor = ""
    while True:
        count = min(limit - len(found), _PAGE)
        page = await client.list(
            wanted.states, count, cursor, reasons=wanted.reasons, image=wanted.image, patience_s=patience_s
        )
        found += page.sessions
        cursor = page.next or ""
        if not cursor or len(found) >= limit:
            return SessionPage(tuple(found), cursor or None)


def _table(sessions: Sequence[SessionView]) -> "Table":
    made = table("SESSION", "STATE", "REASON", "EXIT", "NETWORK", "IMAGE", "CREATED", "COMMAND")
    for each in sessions:
        place = f" ({each.queue_position})" if each.queue_position else ""
        made.add_row(
            each.id,
            f"{each.state}{place}",
            each.reason or "",
            "" if each.exit_code is None else str(each.exit_code),
            each.network,
            cell(each.image),
            each.created_at[:19].replace("T", " "),
            cell(" ".join(each.command)[:80]),
        )
    return made
