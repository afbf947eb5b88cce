"""`opificia egress`: what the gateway decided for a session, and what it would decide."""

from pathlib import Path
from typing import Annotated

import typer

from control.cli.groups import DefaultGroup
from control.cli.output import as_json, fail, with_client

egress = typer.Typer(
    cls=DefaultGroup,
    help="What the gateway decided for a session (`egress SESSION`), or would decide (`egress check`).",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="JSON for programs instead of text for people.")]


@egress.command("show")
def show_(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="The session's id; see `opificia sessions`.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay until the session has ended.")] = False,
    refused: Annotated[bool, typer.Option("--refused", help="Only what was refused.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="One line for each host, with counts.")] = False,
    json: Json = False,
) -> None:
    """Show what the gateway decided for a session; `opificia egress SESSION` does the same.

    Example: opificia egress my-session -f
    """
    from control.cli.streams import show_egress, summarize_egress

    if summary:
        with_client(lambda client: summarize_egress(client, session, follow, json))
    else:
        with_client(lambda client: show_egress(client, session, follow, refused, json))


@egress.command("check")
def check(
    hosts: Annotated[list[str], typer.Argument(metavar="HOST[:PORT]...", help="Port 443 if not given.")],
    session: Annotated[str, typer.Option(help="Under the policy of this session, running or ended.")] = "",
    policy: Annotated[Path | None, typer.Option(help="Under the policy in this file.")] = None,
    json: Json = False,
) -> None:
    """Say what the gateway would decide about hosts, by which rule, at which step, with the addresses it judged.

    The running gateway answers, by the code that judges a CONNECT and with its own name servers; it connects to nothing. Exit code:
    0 all allowed, 1 one or more refused.

    Example: opificia egress check --session my-session git.example.org files.example.com:8443
    """
    from control.api.types import EgressCheck, EgressChecked
    from control.cli.check import show_opinions
    from control.cli.policy import load_policy
    from control.client import ControlClient
    from gateway.runtime.settings import SettingsError

    if bool(session) == (policy is not None):
        fail("give either --session or --policy", 2)
    try:
        wanted = EgressCheck(
            hosts=tuple(hosts), session=session, policy=None if policy is None else load_policy(policy)
        )
    except SettingsError as error:
        fail(str(error), 2)

    async def ask(client: ControlClient) -> EgressChecked:
        return await client.check_egress(wanted)

    found = with_client(ask)
    if json:
        as_json(found)
    else:
        show_opinions(found)
    raise SystemExit(0 if all(each.allowed for each in found.opinions) else 1)
