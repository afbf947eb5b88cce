"""Opinions of the gateway, for people."""

from typing import Final

from control.api.types import EgressChecked
from control.cli.text import escape_line
from gateway.contract.opinion import EgressOpinion
from gateway.contract.policy import NetworkLevel

_HTTPS: Final = 443


def show_opinions(checked: EgressChecked) -> None:
    """Print each opinion: the verdict, the rule or the reason, and each address that was judged."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for each in checked.opinions:
        line = Text("✓ " if each.allowed else "✗ ", style="green" if each.allowed else "bold red")
        line.append(escape_line(f"{_host(each)}  {_verdict(each)}"))
        console.print(line)
        for judged in each.addresses:
            kind = f", {judged.kind}" if judged.kind else ""
            console.print(Text(escape_line(f"    {judged.address}  {judged.why}{kind}")))
        remedy = _remedy(each, checked)
        if remedy:
            console.print(Text(f"    {remedy}"))


def _host(opinion: EgressOpinion) -> str:
    if not opinion.host:
        return opinion.asked
    host = f"[{opinion.host}]" if ":" in opinion.host else opinion.host
    return f"{host}:{opinion.port}"


def _verdict(opinion: EgressOpinion) -> str:
    if opinion.allowed:
        return f"allowed by {opinion.rule}"
    by = f" (allowed by {opinion.rule} until then)" if opinion.rule else ""
    return f"refused at {opinion.step}, {opinion.reason}: {opinion.message}{by}"


def _remedy(opinion: EgressOpinion, checked: EgressChecked) -> str:
    if opinion.allowed:
        if opinion.port == _HTTPS and checked.policy.network is not NetworkLevel.OPEN:
            return "its TLS client must name this host (SNI), and not encrypt that"
        return ""
    match opinion.reason:
        case "host_not_listed" | "port_not_listed":
            return f"to allow it: --allow {_host(opinion)}"
        case "network_disabled":
            return f"to allow it: --network registries --allow {_host(opinion)}"
        case "host_denied" | "address_denied":
            return "deny wins over allow: a rule of the session, or [egress] denied_networks in gateway.toml"
        case "address_not_public" if opinion.addresses and all(
            each.allowed or each.openable for each in opinion.addresses
        ):
            return "an internal mirror is opened by [[egress.trusted]] in gateway.toml"
        case _:
            return ""
