"""`opificia out`: what an ended session left in /out."""

from pathlib import Path
from typing import Annotated

import typer

from control.cli.output import with_client

out = typer.Typer(help="What an ended session left in /out.", no_args_is_help=True, rich_markup_mode=None)

Session = Annotated[str, typer.Argument(metavar="SESSION", help="The session's id; see `opificia sessions`.")]

Json = Annotated[bool, typer.Option("--json", help="JSON for programs instead of text for people.")]


@out.command("ls")
def listing(
    session: Session,
    json: Json = False,
) -> None:
    """List the results of a session.

    Example: opificia out ls my-session
    """
    from control.cli.results import list_out

    with_client(lambda client: list_out(client, session, json))


@out.command("get")
def get(
    session: Session,
    folder: Annotated[Path, typer.Argument(help="Where to unpack the results.")],
    json: Json = False,
) -> None:
    """Fetch the results of a session; links that lead out of the folder, and devices, are left out.

    Example: opificia out get my-session results
    """
    from control.cli.results import fetch_out

    with_client(lambda client: fetch_out(client, session, folder, quiet=json, json=json))
