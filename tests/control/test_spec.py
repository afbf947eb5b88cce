"""What may be asked of a sandbox."""

from typing import Any

import msgspec
import pytest

from control.spec import RESERVED_ENV, Bounds, SandboxSpec, command_problems, spec_problems

BOUNDS = Bounds(
    memory_bytes=8 << 30,
    min_memory_bytes=1 << 30,
    cpus=4,
    pids=1024,
    session_time_ms=1000,
    in_roots=("/srv/work",),
    runtimes=("runsc",),
)


def problems(**fields: Any) -> list[str]:
    return spec_problems(msgspec.convert({"image": "sandbox:latest", **fields}, SandboxSpec), BOUNDS)


@pytest.mark.parametrize(
    "image",
    [
        "sandbox",
        "sandbox:latest",
        "library/sandbox:1.2_x",
        "registry.example:5000/team/sandbox@sha256:" + "0" * 64,
        "sha256:" + "a" * 64,
    ],
)
def test_accepts_image_references(image: str) -> None:
    assert problems(image=image) == []


@pytest.mark.parametrize("image", ["", "UPPER", "a b", "-x", "a:", "a@sha256:1", "../x", "a" * 600, "x;y", "$(x)"])
def test_refuses_what_is_no_image_reference(image: str) -> None:
    assert [each.split(":")[0] for each in problems(image=image)] == ["image"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session_id", "Upper"),
        ("session_id", "a" * 65),
        ("run_id", "a/b"),
        ("command", [""]),
        ("command", ["a\0b"]),
        ("command", ["x"] * 2000),
        ("command", ["x" * 200_000]),
        ("cwd", "relative"),
        ("cwd", "/a\0b"),
        ("env", {"A=B": "x"}),
        ("env", {"A": "x\0"}),
        ("env", {"1A": "x"}),
        ("env", {"A": "x" * 200_000}),
        ("env", {"OPIFICIA_RUNNER_TOKEN": "x"}),
        ("env", {"opificia_x": "x"}),
        ("allow", ["a b"]),
        ("allow", ["x" * 300]),
        ("allow", ["https://host/"]),
        ("deny", ["a\n"]),
        ("deny", [""]),
        ("allow", ["*"]),
        ("allow", ["a.*.example"]),
        ("allow", ["host:99999"]),
        ("allow", ["127.1"]),
        ("allow", ["*.192.0.2.1"]),
        ("deny", ["2001:db8::1"]),
        ("egress_budget.bytes", -1),
        ("egress_budget.connections", 0),
        ("model_budget.input_tokens", -1),
        ("models", [""]),
        ("resources.memory_bytes", 1000),
        ("resources.memory_bytes", 9 << 30),
        ("resources.cpus", 5),
        ("resources.cpus", -1),
        ("resources.pids", 5),
        ("runtime", "runc"),
        ("runtime", "../x"),
        ("time_limit_ms", 1001),
        ("time_limit_ms", -1),
        ("in_dir", "/etc"),
        ("in_dir", "relative"),
        ("in_dir", "/srv/work/../../etc"),
        ("in_dir", "/srv/workshop"),
    ],
)
def test_refuses_and_names_the_field(field: str, value: object) -> None:
    outer, _, inner = field.partition(".")
    found = problems(**{outer: {inner: value} if inner else value})
    assert [each.split(":")[0] for each in found] == [field]


@pytest.mark.parametrize("name", sorted(RESERVED_ENV))
def test_what_the_host_sets_cannot_be_replaced(name: str) -> None:
    assert problems(env={name: "http://elsewhere"})


def test_tells_every_problem_at_once() -> None:
    found = problems(image="", cwd="x", env={"1": ""}, allow=[" "], runtime="x", in_dir="/etc", time_limit_ms=-1)
    assert [each.split(":")[0] for each in found] == [
        "image",
        "cwd",
        "env",
        "allow",
        "time_limit_ms",
        "runtime",
        "in_dir",
    ]


def test_accepts_what_is_within_the_bounds() -> None:
    assert not problems(
        session_id="a-1",
        command=["sh", "-c", "true"],
        env={"A": "b"},
        network="registries",
        allow=["host", "*.host", "host:22", "[2001:db8::1]:443", "bücher.example"],
        resources={"memory_bytes": 2 << 30, "cpus": 0.5, "pids": 64},
        runtime="runsc",
        time_limit_ms=1000,
        in_dir="/srv/work/project",
    )


def test_a_command_for_a_running_session_must_name_a_program() -> None:
    assert command_problems((), "/work", {}) == ["argv: must name a program"]
    assert command_problems(("ls",), "/work", {"A": "b"}) == []
