"""`opificia doctor` on a real host: all is well, it leaves nothing, and it sees the walls that are taken away."""

import json
from typing import Any

from control.doctor.trial import CHECKS
from control.plan.network import NetworkSettings
from tests.support.engine import PrivateEngine
from tests.support.host import PrivateHost
from tests.support.hostside import NEIGHBOUR_RULES, without_rules

# Of the machine that the tests run on, not of the host that is tested.
MACHINE = ("clock", "disk", "sysctl fs.pipe-user-pages-soft", "sysctl net.core.somaxconn")


def examined(host: PrivateHost) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run the doctor; return its exit code and its findings by check."""
    settings = (
        "--config",
        str(host.root / "etc/control.toml"),
        "--gateway-config",
        str(host.root / "etc/gateway.toml"),
    )
    done = host.cli("doctor", *settings, "--json", check=False)
    findings = {each["check"]: each for each in json.loads(done.stdout)}
    return done.returncode, findings


def test_a_host_in_order_passes_every_check_and_nothing_is_left(host: PrivateHost) -> None:
    _, findings = examined(host)
    assert [each for each in findings.values() if not each["ok"] and each["check"] not in MACHINE] == []
    assert {title for title, _ in CHECKS.values()} < findings.keys()
    assert "for it" in findings["the operator's model key is nowhere"]["detail"]
    assert len([check for check in findings if check.startswith("image ")]) == 3
    ended = json.loads(host.cli("sessions", "--limit", "2", "--json").stdout)["sessions"]
    # The doctor tells its sessions to stop and does not wait: one that is still stopping has no reason yet.
    assert ended
    assert all("stopped_by_user" in (each.get("reason"), each.get("ending")) for each in ended)


def test_a_wall_that_is_gone_is_seen_and_a_remedy_is_named(
    host: PrivateHost, engine: PrivateEngine, network: NetworkSettings
) -> None:
    with without_rules(engine, network, NEIGHBOUR_RULES):
        code, findings = examined(host)
    assert code == 1
    # The daemon sees it as well: it launches nothing, so nothing is tried.
    assert not findings["a probe sandbox runs"]["ok"] or not findings["no other sandbox is reached"]["ok"]
    failed = [each for each in findings.values() if not each["ok"] and each["check"] not in MACHINE]
    assert failed
    assert all(each["remedy"] for each in failed)
