"""Each client at the same server: let in by one rule, refused when that one thing is different, and told why.

One server stands behind two names of one rule (`*.corp.example`). What is different is the session's rules or level,
the address that the name leads to, the token, or what is left of the budget.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.clients.commands import CLIENTS, CURL, QUICKLY, Client
from tests.clients.conftest import Launch
from tests.clients.sandboxes import Sandbox
from tests.clients.world import CORP, INSIDE
from tests.support.gateway_process import TOKEN, GatewayProcess
from tests.support.processes import wait_until


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a client is refused: one thing is not as it is for session `opened` at host CORP."""

    reason: str
    session: str = "opened"
    host: str = CORP
    token: str = TOKEN
    status: int = 403

    def __str__(self) -> str:
        return self.reason


REFUSALS = (
    Refusal("host_not_listed", session="agent"),
    Refusal("network_disabled", session="model"),
    Refusal("address_not_public", host=INSIDE),
    Refusal("budget_exhausted", session="spent"),
    Refusal("credentials_wrong", token="another-token", status=407),
)


@pytest.fixture(scope="module")
def spent(sandbox: Launch, gateway: GatewayProcess) -> Sandbox:
    """A session whose bytes are used up, by a download that was cut for it."""
    spender = sandbox("spent")
    done = spender.run(*CURL, "--output", "/dev/null", f"https://{CORP}/big")
    assert done.code != 0, done.output
    wait_until(lambda: len(gateway.audit("spent")) == 2, "the end of the download in the log")
    assert [line["reason"] for line in gateway.audit("spent")] == ["allow:*.corp.example", "budget_exhausted"]
    return spender


def test_a_download_within_the_budget_is_not_cut(sandbox: Launch) -> None:
    done = sandbox("opened").run(*CURL, "--output", "/dev/null", f"https://{CORP}/big")
    assert done.code == 0, done.output


@pytest.fixture(params=CLIENTS, ids=str)
def client(request: pytest.FixtureRequest) -> Client:
    """Each of the clients, installed where it is not part of the image."""
    chosen: Client = request.param
    if chosen.installed:
        request.getfixturevalue("sdks")
    return chosen


def test_a_client_is_let_in_by_a_rule(sandbox: Launch, client: Client) -> None:
    done = sandbox("opened").run(*client.argv(CORP), environment=QUICKLY)
    assert done.code == 0, done.output
    assert client.finds in done.stdout
    # Nothing that was for the gateway went on to the server.
    assert "proxy-" not in done.stdout


@pytest.mark.usefixtures("spent")
@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_a_client_is_refused_and_its_user_told_why(
    sandbox: Launch, gateway: GatewayProcess, client: Client, refusal: Refusal
) -> None:
    place = sandbox(refusal.session)
    changed = {name: value.replace(TOKEN, refusal.token) for name, value in place.environment.items() if TOKEN in value}
    before = len(gateway.audit(refusal.session))
    done = place.run(*client.argv(refusal.host), environment={**QUICKLY, **changed})
    assert done.code != 0, done.output
    assert client.finds not in done.stdout
    assert (refusal.reason if client.tells_reason else str(refusal.status)) in done.output
    if refusal.status == 407:
        return  # nobody's log: whoever asked did not show who it is
    wanted = {"event": "refuse", "host": refusal.host, "port": client.port, "reason": refusal.reason}

    def logged() -> list[dict[str, Any]]:
        return gateway.audit(refusal.session)[before:]

    wait_until(lambda: any(wanted.items() <= line.items() for line in logged()), "the refusal in the log")
    assert not any(line["event"] == "allow" for line in logged())


def test_a_user_who_asks_curl_for_more_sees_the_reason(sandbox: Launch) -> None:
    done = sandbox("agent").run("curl", "-sSv", f"https://{CORP}/hello")
    assert "403 host_not_listed: this host is not on the list of this session" in done.stderr
    assert "X-Opificia-Reason: host_not_listed" in done.stderr
