"""`opificia gateway status|sessions`: the gateway as control knows it."""

from control.cli.output import as_json, show, table
from control.client import ControlClient


async def show_status(client: ControlClient, *, json: bool) -> int:
    """Print whether the gateway is there; return 0 if it is."""
    found = await client.gateway()
    if json:
        as_json({"connected": found.connected, "epoch": found.epoch, "sessions": len(found.sessions)})
    elif found.connected:
        print(f"connected, epoch {found.epoch}, {len(found.sessions)} sessions")
    else:
        print("not connected; check opificia-gateway")
    return 0 if found.connected else 1


async def show_served(client: ControlClient, *, json: bool) -> int:
    """Print the sessions that the gateway serves, with what they have used."""
    found = await client.gateway()
    if json:
        as_json(found.sessions)
        return 0
    made = table("SESSION", "NETWORK", "ADDRESS", "ALLOWED", "REFUSED", "UP", "DOWN", "MODEL REQUESTS", "TOKENS")
    for each in found.sessions:
        used = each.usage
        counts = (used.egress_allowed, used.egress_refused, used.egress_bytes_up, used.egress_bytes_down)
        tokens = f"{used.input_tokens} in, {used.output_tokens} out"
        made.add_row(each.id, each.network, each.address, *map(str, counts), str(used.model_requests), tokens)
    show(made)
    return 0
