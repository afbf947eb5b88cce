"""One test a line of the hardening: what Docker is asked for when a sandbox is created."""

import json
from dataclasses import replace
from ipaddress import IPv4Address
from typing import Any

import msgspec
import pytest

from control.docker.seccomp import default_seccomp_profile
from control.plan.container import (
    SandboxPlan,
    SandboxSettings,
    hardware_address,
    sandbox_container,
)
from control.plan.environment import sandbox_environment
from control.plan.network import NetworkSettings
from gateway.contract.limits import GIB, MIB, ControlLimits

PLAN = SandboxPlan(
    session="s1",
    run="r1",
    policy_digest="d1",
    image="sha256:aa",
    address=IPv4Address("10.231.0.16"),
    environment={"B": "2", "A": "1"},
    in_dir="/data/sessions/s1/in",
    out_volume="opificia-out-s1",
    runner="/usr/lib/opificia/runner.pyz",
)


def body(
    plan: SandboxPlan = PLAN,
    settings: SandboxSettings | None = None,
) -> dict[str, Any]:
    planned = sandbox_container(
        plan, settings or SandboxSettings(), NetworkSettings(), ControlLimits(), "h1", '{"profile":1}'
    )
    assert planned.name == "opificia-s1"
    # It must be JSON as it stands.
    return msgspec.json.decode(msgspec.json.encode(planned.body))


def host_config(**fields: Any) -> dict[str, Any]:
    return body(replace(PLAN, **fields))["HostConfig"]


def mount(target: str) -> dict[str, Any]:
    (found,) = [mount for mount in host_config()["Mounts"] if mount["Target"] == target]
    return found


def test_root_is_read_only() -> None:
    assert host_config()["ReadonlyRootfs"] is True


def test_no_capability_is_left() -> None:
    assert host_config()["CapDrop"] == ["ALL"]
    assert "CapAdd" not in host_config()


def test_is_not_privileged_and_has_no_devices() -> None:
    assert host_config()["Privileged"] is False
    assert host_config()["Devices"] == []


def test_gains_no_privileges_by_setuid_programs() -> None:
    assert "no-new-privileges=true" in host_config()["SecurityOpt"]


def test_has_the_given_seccomp_profile() -> None:
    assert 'seccomp={"profile":1}' in host_config()["SecurityOpt"]


def test_memory_is_four_gibibytes_and_swap_adds_nothing() -> None:
    assert host_config()["Memory"] == 4 * GIB
    assert host_config()["MemorySwap"] == 4 * GIB
    assert "OomKillDisable" not in host_config()


def test_a_sessions_own_memory_holds_for_swap_too() -> None:
    config = host_config(memory_bytes=GIB)
    assert (config["Memory"], config["MemorySwap"]) == (GIB, GIB)


def test_has_two_cpus_unless_the_session_says_otherwise() -> None:
    assert host_config()["NanoCpus"] == 2_000_000_000
    assert host_config(cpus=0.5)["NanoCpus"] == 500_000_000


def test_has_1024_processes_unless_the_session_says_otherwise() -> None:
    assert host_config()["PidsLimit"] == 1024
    assert host_config(pids=32)["PidsLimit"] == 32


def test_open_files_are_limited_and_cores_are_not_dumped() -> None:
    assert host_config()["Ulimits"] == [
        {"Name": "core", "Soft": 0, "Hard": 0},
        {"Name": "nofile", "Soft": 16_384, "Hard": 16_384},
    ]


def test_dies_before_the_hosts_daemons_when_memory_is_short() -> None:
    assert host_config()["OomScoreAdj"] == 500


def test_shared_memory_is_limited() -> None:
    assert host_config()["ShmSize"] == 64 * MIB


def test_ipc_is_private() -> None:
    assert host_config()["IpcMode"] == "private"


def test_cgroup_namespace_is_its_own() -> None:
    assert host_config()["CgroupnsMode"] == "private"


def test_processes_and_host_name_are_its_own() -> None:
    assert host_config()["PidMode"] == ""
    assert host_config()["UTSMode"] == ""


def test_has_an_init_that_reaps() -> None:
    assert host_config()["Init"] is True


def test_kernel_files_are_masked_whatever_the_engines_defaults() -> None:
    assert {"/proc/kcore", "/proc/keys", "/proc/interrupts", "/proc/pressure", "/sys/firmware"} <= set(
        host_config()["MaskedPaths"]
    )
    assert {"/proc/sys", "/proc/sysrq-trigger"} <= set(host_config()["ReadonlyPaths"])


def test_user_is_a_high_number_that_no_image_can_rename() -> None:
    assert body()["User"] == "60610:60610"


def test_scratch_folders_are_in_memory_with_sizes() -> None:
    assert host_config()["Tmpfs"] == {
        "/home/node": f"rw,nosuid,nodev,exec,size={256 * MIB},mode=0700,uid=60610,gid=60610",
        "/tmp": f"rw,nosuid,nodev,noexec,size={512 * MIB},mode=1777",
        "/work": f"rw,nosuid,nodev,exec,size={2 * GIB},mode=0755,uid=60610,gid=60610",
    }


def test_nothing_is_mounted_by_binds() -> None:
    assert "Binds" not in host_config()
    assert "Volumes" not in body()


def test_input_is_mounted_read_only_without_what_is_mounted_below_it() -> None:
    found = mount("/in")
    assert (found["Type"], found["Source"], found["ReadOnly"]) == ("bind", "/data/sessions/s1/in", True)
    assert found["BindOptions"] == {"NonRecursive": True, "Propagation": "rprivate"}


def test_results_go_to_the_sessions_own_volume() -> None:
    found = mount("/out")
    assert (found["Type"], found["Source"]) == ("volume", "opificia-out-s1")
    assert found["VolumeOptions"] == {"NoCopy": True}


def test_runner_is_mounted_read_only_and_is_the_command() -> None:
    found = mount("/opificia/runner.pyz")
    assert (found["Source"], found["ReadOnly"]) == ("/usr/lib/opificia/runner.pyz", True)
    assert body()["Entrypoint"] == ["python3", "-I", "/opificia/runner.pyz"]
    assert body()["Cmd"] == []


def test_an_image_with_its_own_runner_keeps_its_entrypoint() -> None:
    own = body(replace(PLAN, runner=None))
    assert "Entrypoint" not in own
    assert [mount["Target"] for mount in own["HostConfig"]["Mounts"]] == ["/in", "/out"]


def test_certificate_authorities_are_mounted_read_only_when_given() -> None:
    mounts = body(settings=SandboxSettings(ca_bundle="/etc/ssl/ca.pem"))["HostConfig"]["Mounts"]
    (found,) = [mount for mount in mounts if mount["Target"] == "/opificia/ca.crt"]
    assert (found["Source"], found["ReadOnly"]) == ("/etc/ssl/ca.pem", True)


def test_volumes_that_an_image_declares_become_memory_of_limited_size() -> None:
    mounts = host_config(image_volumes=("/data", "/work/", "/out"))["Mounts"]
    assert [mount for mount in mounts if mount["Type"] == "tmpfs"] == [
        {"Type": "tmpfs", "Target": "/data", "TmpfsOptions": {"SizeBytes": 512 * MIB, "Mode": 0o1777}}
    ]


def test_logs_are_capped_in_the_engine_too() -> None:
    assert host_config()["LogConfig"] == {
        "Type": "json-file",
        "Config": {"max-size": str(64 * MIB), "max-file": "2"},
    }


def test_no_dns_question_leaves() -> None:
    config = host_config()
    assert config["Dns"] == ["127.0.0.1"]
    assert config["DnsOptions"] == ["timeout:1", "attempts:1"]
    assert config["DnsSearch"] == ["."]


def test_gateway_is_known_by_name_without_dns() -> None:
    assert host_config()["ExtraHosts"] == ["opificia-gateway:10.231.0.2"]


def test_ipv6_is_off() -> None:
    assert host_config()["Sysctls"] == {
        "net.ipv6.conf.all.disable_ipv6": "1",
        "net.ipv6.conf.default.disable_ipv6": "1",
    }


def test_is_a_member_of_the_sandbox_network_alone_at_its_assigned_address() -> None:
    whole = body()
    assert whole["HostConfig"]["NetworkMode"] == "opificia-sandbox"
    assert whole["NetworkingConfig"]["EndpointsConfig"] == {
        "opificia-sandbox": {
            "IPAMConfig": {"IPv4Address": "10.231.0.16"},
            "MacAddress": "02:42:0a:e7:00:10",
        }
    }
    assert whole["MacAddress"] == "02:42:0a:e7:00:10"


def test_publishes_no_port() -> None:
    assert host_config()["PublishAllPorts"] is False
    assert "PortBindings" not in host_config()


def test_runtime_is_the_engines_unless_settings_or_session_name_one() -> None:
    assert host_config()["Runtime"] == ""
    assert body(settings=SandboxSettings(runtime="runsc"))["HostConfig"]["Runtime"] == "runsc"
    assert host_config(runtime="kata")["Runtime"] == "kata"


def test_stays_after_its_end_and_is_never_restarted() -> None:
    assert host_config()["AutoRemove"] is False
    assert host_config()["RestartPolicy"] == {"Name": "no"}


def test_an_images_health_check_does_not_run() -> None:
    assert body()["Healthcheck"] == {"Test": ["NONE"]}


def test_labels_say_whose_it_is() -> None:
    assert body()["Labels"] == {
        "opificia.host": "h1",
        "opificia.policy": "d1",
        "opificia.role": "sandbox",
        "opificia.run": "r1",
        "opificia.session": "s1",
    }


def test_environment_is_exactly_what_was_planned() -> None:
    assert body()["Env"] == ["A=1", "B=2"]


def test_environment_names_the_gateway_for_every_client() -> None:
    found = sandbox_environment("s1", "r1", "tok", NetworkSettings(), {}, ca_bundle=False)
    proxy = "http://s1:tok@opificia-gateway:8900"
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "OPIFICIA_EGRESS_PROXY"):
        assert found[name] == proxy
    assert found["NO_PROXY"] == found["no_proxy"] == "opificia-gateway,localhost,127.0.0.1"
    assert found["OPIFICIA_RUNNER_URL"] == "ws://opificia-gateway:8900/runner?session=s1"
    assert found["OPIFICIA_RUNNER_TOKEN"] == found["ANTHROPIC_AUTH_TOKEN"] == "tok"
    assert found["ANTHROPIC_BASE_URL"] == "http://opificia-gateway:8900/model/s1"
    assert (found["OPIFICIA_SESSION_ID"], found["OPIFICIA_RUN_ID"]) == ("s1", "r1")
    assert found["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == "1"
    assert found["CLAUDE_CODE_PROVIDER_MANAGED_BY_HOST"] == "1"
    assert found["NODE_USE_ENV_PROXY"] == "1"
    assert "ANTHROPIC_API_KEY" not in found
    assert not any(name.startswith("OPENAI_") for name in found)
    assert "SSL_CERT_FILE" not in found


def test_environment_leads_openais_clients_to_the_provider_that_the_operator_names() -> None:
    found = sandbox_environment("s1", "r1", "tok", NetworkSettings(), {}, ca_bundle=False, openai_provider="azure")
    assert found["OPENAI_BASE_URL"] == "http://opificia-gateway:8900/model/s1/azure/v1"
    assert found["OPENAI_API_KEY"] == "tok"


def test_environment_names_the_operators_certificate_authorities_for_every_client() -> None:
    found = sandbox_environment("s1", "r1", "tok", NetworkSettings(), {}, ca_bundle=True)
    names = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO")
    assert {found[name] for name in (*names, "CURL_CA_BUNDLE")} == {"/opificia/ca.crt"}


def test_a_callers_environment_cannot_replace_ours() -> None:
    extra = {"HTTPS_PROXY": "http://elsewhere", "MINE": "1"}
    found = sandbox_environment("s1", "r1", "tok", NetworkSettings(), extra, ca_bundle=False)
    assert found["MINE"] == "1"
    assert found["HTTPS_PROXY"] == "http://s1:tok@opificia-gateway:8900"


def test_hardware_address_follows_from_the_address() -> None:
    assert hardware_address(IPv4Address("10.231.255.1")) == "02:42:0a:e7:ff:01"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (SandboxSettings(memory_bytes=MIB), "memory_bytes"),
        (SandboxSettings(work_bytes=4 * GIB), "work_bytes"),
        (SandboxSettings(tmp_bytes=0), "tmp_bytes"),
        (SandboxSettings(cpus=0), "cpus"),
        (SandboxSettings(pids=1), "pids"),
        (SandboxSettings(open_files=3), "open_files"),
        (SandboxSettings(uid=0), "uid"),
        (SandboxSettings(gid=65_534), "gid"),
        (SandboxSettings(in_roots=("srv",)), "in_roots"),
        (SandboxSettings(ca_bundle="ca.pem"), "ca_bundle"),
        (SandboxSettings(openai_provider="../s2"), "openai_provider"),
        (SandboxSettings(seccomp_profile="unconfined"), "seccomp_profile"),
    ],
)
def test_settings_that_would_weaken_a_sandbox_are_refused(settings: SandboxSettings, field: str) -> None:
    assert any(field in problem for problem in settings.problems())


def test_default_settings_have_no_problem() -> None:
    assert SandboxSettings().problems() == []


def _allowed(profile: dict[str, Any]) -> set[str]:
    """System calls that the profile lets a container without capabilities make on amd64, whatever their arguments."""
    return {
        name
        for rule in profile["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW"
        and not rule.get("args")
        and not rule.get("includes", {}).get("caps")
        and "amd64" in rule.get("includes", {}).get("arches", ["amd64"])
        for name in rule["names"]
    }


def test_seccomp_profile_refuses_what_it_does_not_name() -> None:
    assert json.loads(default_seccomp_profile())["defaultAction"] == "SCMP_ACT_ERRNO"


@pytest.mark.parametrize(
    "call",
    [
        *("io_uring_setup", "io_uring_enter", "io_uring_register", "socket", "socketcall", "clone3"),
        *("bpf", "keyctl", "add_key", "request_key", "mount", "unshare", "setns", "kexec_load", "init_module"),
        *("perf_event_open", "userfaultfd", "open_by_handle_at", "pivot_root", "swapon", "reboot"),
    ],
)
def test_seccomp_profile_does_not_allow(call: str) -> None:
    assert call not in _allowed(json.loads(default_seccomp_profile()))


@pytest.mark.parametrize(
    "call",
    ["read", "openat2", "futex_waitv", "landlock_create_ruleset", "cachestat", "fchmodat2", "mseal", "close_range"],
)
def test_seccomp_profile_allows_what_new_programs_call(call: str) -> None:
    assert call in _allowed(json.loads(default_seccomp_profile()))


def test_seccomp_profile_allows_four_socket_families() -> None:
    rules = [rule for rule in json.loads(default_seccomp_profile())["syscalls"] if rule["names"] == ["socket"]]
    families = sorted(argument["value"] for rule in rules for argument in rule["args"])
    assert families == [1, 2, 10, 16]
    assert all(argument["op"] == "SCMP_CMP_EQ" for rule in rules for argument in rule["args"])
