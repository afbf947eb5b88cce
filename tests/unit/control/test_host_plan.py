"""What the host is to have: forwarder, helpers, network, firewall rules, a free subnet. One test a line."""

import json
import shlex
from typing import Any

import pytest

from control.plan import firewall, routes
from control.plan.container import ContainerPlan, ImageSettings
from control.plan.host import (
    ForwarderSettings,
    HostPlan,
    firewall_container,
    forwarder_container,
    network_arguments,
    network_problems,
    preflight_container,
    volumes_container,
)
from control.plan.network import NetworkSettings
from gateway.contract.limits import MIB

NETWORK = NetworkSettings()
PLAN = HostPlan(network=NETWORK, images=ImageSettings(), forwarder=ForwarderSettings(), door="/run/opificia/door")
FORWARDER = forwarder_container(PLAN, "h1", "sha256:aa", (60600, 60601))
VOLUMES = volumes_container(PLAN, "h1", "sha256:bb")
FIREWALL = firewall_container(PLAN, "h1", "sha256:bb")


@pytest.mark.parametrize("planned", [FORWARDER, VOLUMES, FIREWALL], ids=lambda planned: planned.name)
def test_every_container_of_the_host_is_hardened(planned: ContainerPlan) -> None:
    config = planned.body["HostConfig"]
    assert config["ReadonlyRootfs"] is True
    assert config["CapDrop"] == ["ALL"]
    assert config["Privileged"] is False
    assert "no-new-privileges=true" in config["SecurityOpt"]
    assert config["Memory"] == config["MemorySwap"] == 256 * MIB
    assert 0 < config["PidsLimit"] <= 256
    assert config["IpcMode"] == config["CgroupnsMode"] == "private"
    assert config["LogConfig"] in (
        {"Type": "none"},
        {"Type": "json-file", "Config": {"max-size": str(MIB), "max-file": "2"}},
    )
    assert config["Init"] is True
    assert config["RestartPolicy"] == {"Name": "always"}
    assert "Binds" not in config
    assert planned.body["Labels"]["opificia.host"] == "h1"


def test_forwarder_runs_as_its_own_user_without_any_capability() -> None:
    assert FORWARDER.body["User"] == "60600:60601"
    assert "CapAdd" not in FORWARDER.body["HostConfig"]


def test_forwarder_is_a_member_of_the_internal_network_alone_at_its_pinned_address() -> None:
    assert FORWARDER.name == "opificia-gateway"
    assert FORWARDER.body["HostConfig"]["NetworkMode"] == "opificia-sandbox"
    (endpoint,) = FORWARDER.body["NetworkingConfig"]["EndpointsConfig"].values()
    assert endpoint["IPAMConfig"] == {"IPv4Address": "10.231.0.2"}


def test_forwarder_sees_of_the_host_only_the_doors_folder_read_only() -> None:
    (mount,) = FORWARDER.body["HostConfig"]["Mounts"]
    assert (mount["Source"], mount["Target"], mount["ReadOnly"]) == ("/run/opificia/door", "/door", True)


def test_forwarders_timeout_lies_above_a_day_long_session() -> None:
    assert "OPIFICIA_IDLE_TIMEOUT=90000s" in FORWARDER.body["Env"]


def test_forwarder_may_open_as_many_files_as_its_connections_need() -> None:
    (limit,) = FORWARDER.body["HostConfig"]["Ulimits"]
    assert limit == {"Name": "nofile", "Soft": 17_124, "Hard": 17_124}


def test_volumes_helper_has_loop_devices_and_no_network() -> None:
    config = VOLUMES.body["HostConfig"]
    assert config["NetworkMode"] == "none"
    assert config["DeviceCgroupRules"] == ["b 7:* rw", "c 10:237 rw"]
    assert "CapAdd" not in config


def test_firewall_helper_may_change_the_hosts_network_and_sees_no_file_of_it() -> None:
    config = FIREWALL.body["HostConfig"]
    assert config["NetworkMode"] == "host"
    assert config["CapAdd"] == ["NET_ADMIN"]
    assert "Mounts" not in config


def test_firewall_helper_loads_the_rules_whenever_the_engine_starts_it() -> None:
    shell, option, script = FIREWALL.body["Cmd"]
    assert (shell, option) == ("sh", "-c")
    load = firewall.load_command(NETWORK, firewall.rules(NETWORK))
    assert shlex.split(script) == [*load, "&&", "exec", "opificia-serve"]


def test_the_look_at_the_hosts_routes_may_change_nothing() -> None:
    config = preflight_container(PLAN, "h1", "sha256:bb").body["HostConfig"]
    assert "CapAdd" not in config
    assert config["RestartPolicy"] == {"Name": "no"}


def test_another_setting_or_image_gives_another_plan_label() -> None:
    same = forwarder_container(PLAN, "h1", "sha256:aa", (60600, 60601))
    other_image = forwarder_container(PLAN, "h1", "sha256:cc", (60600, 60601))
    label = "opificia.plan"
    assert same.body["Labels"][label] == FORWARDER.body["Labels"][label] != other_image.body["Labels"][label]


def _found(**changes: Any) -> dict[str, Any]:
    """The network as the engine shows it when it is as planned, with `changes`."""
    arguments = network_arguments(PLAN, "h1")
    return {
        "Driver": "bridge",
        "Internal": True,
        "EnableIPv6": False,
        "IPAM": arguments["ipam"],
        "Options": arguments["options"],
        "Labels": arguments["labels"],
    } | changes


def test_the_planned_network_has_no_problem() -> None:
    assert network_problems(_found(), PLAN, "h1") == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"Driver": "macvlan"}, "driver"),
        ({"Internal": False}, "not internal"),
        ({"EnableIPv6": True}, "IPv6"),
        ({"IPAM": {"Config": [{"Subnet": "10.1.0.0/16"}]}}, "subnet"),
        ({"IPAM": {"Config": None}}, "subnet"),
        ({"Labels": None}, "installation"),
        ({"Options": {"com.docker.network.bridge.name": "opificia0"}}, "inhibit_ipv4"),
    ],
)
def test_each_difference_of_the_network_is_told(change: dict[str, Any], word: str) -> None:
    assert any(word in problem for problem in network_problems(_found(**change), PLAN, "h1"))


def test_network_is_internal_with_a_pinned_bridge_that_has_no_address() -> None:
    arguments = network_arguments(PLAN, "h1")
    assert arguments["internal"] is True
    assert arguments["enable_ipv6"] is False
    assert arguments["options"]["com.docker.network.bridge.name"] == "opificia0"
    assert arguments["options"]["com.docker.network.bridge.inhibit_ipv4"] == "true"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (ForwarderSettings(user="Root User"), "user"),
        (ForwarderSettings(connections=0), "connections"),
        (ForwarderSettings(memory_bytes=MIB), "memory_bytes"),
    ],
)
def test_settings_of_a_forwarder_that_cannot_be_are_refused(settings: ForwarderSettings, field: str) -> None:
    assert [problem.split(":")[0] for problem in settings.problems()] == [field]


def _listing(rules: dict[str, firewall.Rule]) -> dict[str, Any]:
    """What nft would list after loading `rules`."""
    commands = json.loads(firewall.load_command(NETWORK, rules)[-1])["nftables"]
    return {"nftables": [{"metainfo": {}}, *(command["add"] for command in commands if "add" in command)]}


def test_loaded_rules_have_no_problem() -> None:
    assert firewall.problems(json.dumps(_listing(firewall.rules(NETWORK))), NETWORK) == []


@pytest.mark.parametrize("missing", firewall.rules(NETWORK))
def test_each_missing_rule_is_noticed(missing: str) -> None:
    rules = firewall.rules(NETWORK)
    family, chain, _ = rules.pop(missing)
    (problem,) = firewall.problems(json.dumps(_listing(rules)), NETWORK)
    assert problem == f"the firewall chain {chain} of table {family} opificia0 holds other rules than it should"


def test_an_added_rule_is_noticed() -> None:
    rules = {"hole": ("inet", "input", [{"accept": None}]), **firewall.rules(NETWORK)}
    assert len(firewall.problems(json.dumps(_listing(rules)), NETWORK)) == 1


def test_rules_in_another_order_are_noticed() -> None:
    rules = dict(reversed(firewall.rules(NETWORK).items()))
    problems = firewall.problems(json.dumps(_listing(rules)), NETWORK)
    # The fourth chain holds a single rule.
    assert len(problems) == 3


def test_an_unhooked_chain_is_noticed() -> None:
    listing = _listing(firewall.rules(NETWORK))
    for entry in listing["nftables"]:
        if entry.get("chain", {}).get("family") == "bridge":
            entry["chain"]["prio"] = 500
    problems = firewall.problems(json.dumps(listing), NETWORK)
    assert len(problems) == 2
    assert all("hooked" in problem for problem in problems)


def test_a_flushed_firewall_is_noticed_chain_by_chain() -> None:
    problems = firewall.problems('{"nftables": [{"metainfo": {}}]}', NETWORK)
    assert len(problems) == 4
    assert all("missing" in problem for problem in problems)


@pytest.mark.parametrize("listing", ["", "[]", "{}", '{"nftables": [{"rule": {"table": 1}}, 3]}'])
def test_a_listing_that_cannot_be_read_is_a_problem(listing: str) -> None:
    assert firewall.problems(listing, NETWORK) != []


def _route(dst: str, **fields: str) -> dict[str, Any]:
    return {"dst": dst, "dev": "eth0", **fields}


@pytest.mark.parametrize("dst", ["10.231.0.0/16", "10.231.4.0/24", "10.0.0.0/8", "10.231.9.9"])
def test_a_route_into_the_sandbox_subnet_is_refused(dst: str) -> None:
    (problem,) = routes.problems(json.dumps([_route(dst)]), NETWORK)
    assert "10.231.0.0/16 overlaps" in problem
    assert "choose another" in problem


@pytest.mark.parametrize(
    "route",
    [
        _route("default"),
        _route("10.230.0.0/16"),
        _route("192.168.0.0/16"),
        {"dst": "10.231.0.0/16", "dev": "opificia0"},
        _route("10.231.255.255", type="broadcast"),
    ],
)
def test_other_routes_and_our_own_bridges_are_none(route: dict[str, Any]) -> None:
    assert routes.problems(json.dumps([route]), NETWORK) == []


def test_an_unreachable_route_counts_although_it_has_no_device() -> None:
    assert routes.problems('[{"type": "unreachable", "dst": "10.231.0.0/24"}]', NETWORK) != []


def test_routes_that_cannot_be_read_are_a_problem() -> None:
    assert routes.problems('[{"dev": "eth0"}]', NETWORK) != []


@pytest.mark.parametrize(
    "listing",
    ["3", "{}", '{"nftables":3}', '{"nftables":["x"]}', '{"nftables":{"chain":1}}', '{"nftables":["chain"]}', "[1]"],
)
def test_a_listing_that_is_none_is_a_problem_and_no_fault_of_ours(listing: str) -> None:
    network = NetworkSettings()
    assert firewall.problems(listing, network)
    assert routes.problems(listing, network)
