"""What a caller may ask of a sandbox, and what is wrong with a request. Pure: it knows no engine, store or gateway.

A caller never names a path on the host, except `in_dir` under the operator's `in_roots`; results go where the daemon decides.
"""

import re
from pathlib import PurePosixPath
from typing import Final

import msgspec

from gateway.contract.ids import is_session_id
from gateway.contract.limits import MIB
from gateway.contract.policy import EgressBudget, ModelBudget, NetworkLevel, budget_problems
from gateway.core.rules import HostRule, RuleError

# execve(2) takes 128 KiB in one string and a quarter of the stack in all; a request larger than that cannot start.
MAX_COMMAND_BYTES: Final = 128 * 1024
MAX_COMMAND_ARGUMENTS: Final = 1_000
MAX_ENV_BYTES: Final = 128 * 1024
MAX_ENV_ENTRIES: Final = 1_000
MAX_RULES: Final = 1_000
# A DNS name is at most 253 characters (RFC 1035 §2.3.4); "*." and ":65535" come on top.
MAX_RULE_CHARACTERS: Final = 262
# The engine itself refuses less than 6 MiB; a shell with a runner needs about 30.
MIN_MEMORY_BYTES: Final = 64 * MIB
MIN_PIDS: Final = 16

# Docker's reference grammar (distribution/reference), bounded; and an image id.
_IMAGE: Final = re.compile(
    r"(?:[a-zA-Z0-9][a-zA-Z0-9-]*(?:\.[a-zA-Z0-9][a-zA-Z0-9-]*)*(?::[0-9]{1,5})?/)?[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?|sha256:[0-9a-f]{64}",
    re.ASCII,
)
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}", re.ASCII)
_RUNTIME: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}", re.ASCII)

# Set by the daemon for every sandbox. A caller who could set them would route a sandbox around its own door or show it
# another session's credentials.
RESERVED_ENV: Final = frozenset(
    {
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_AUTH_TOKEN",
        "ANTHROPIC_BASE_URL",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
        "CLAUDE_CODE_PROVIDER_MANAGED_BY_HOST",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
    }
)
RESERVED_ENV_PREFIX: Final = "OPIFICIA_"


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Share of the host that one sandbox takes; 0 means the operator's default."""

    memory_bytes: int = 0
    cpus: float = 0
    pids: int = 0


class SandboxSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One session as its caller wants it. Empty `session_id` and `run_id` are filled in by the daemon.

    `command` is what the session is for: the session ends when it ends. Without one the session waits for commands
    until it is stopped. `time_limit_ms` counts from launch; 0 means the operator's limit.
    """

    image: str
    session_id: str = ""
    run_id: str = ""
    command: tuple[str, ...] = ()
    cwd: str = "/work"
    env: dict[str, str] = {}
    in_dir: str = ""
    network: NetworkLevel = NetworkLevel.NONE
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    egress_budget: EgressBudget = EgressBudget()
    model_budget: ModelBudget = ModelBudget()
    models: tuple[str, ...] = ()
    resources: Resources = Resources()
    runtime: str = ""
    time_limit_ms: int = 0


class SessionPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The part of a spec that the gateway enforces: what a policy file holds, and what can be asked about before a session."""

    network: NetworkLevel = NetworkLevel.NONE
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    egress_budget: EgressBudget = EgressBudget()
    model_budget: ModelBudget = ModelBudget()
    models: tuple[str, ...] = ()


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the operator allows at most: sizes, the time limit, folders that may be mounted, runtimes beside the default."""

    memory_bytes: int
    # Above what /work, /tmp and /home/node may take together: they are charged to the sandbox's memory.
    min_memory_bytes: int
    cpus: float
    pids: int
    session_time_ms: int
    in_roots: tuple[str, ...] = ()
    runtimes: tuple[str, ...] = ()


def spec_problems(spec: SandboxSpec, bounds: Bounds) -> list[str]:
    """Return every problem of `spec`, each a sentence that begins with the field; empty when it can be accepted."""
    return [
        *_identity_problems(spec),
        *_command_problems(spec.command, spec.cwd),
        *env_problems(spec.env),
        *policy_problems(policy_of(spec)),
        *_resource_problems(spec, bounds),
        *_folder_problems(spec.in_dir, bounds.in_roots),
    ]


def policy_of(spec: SandboxSpec) -> SessionPolicy:
    """Return the part of a spec that the gateway enforces."""
    return SessionPolicy(**{name: getattr(spec, name) for name in SessionPolicy.__struct_fields__})


def command_problems(argv: tuple[str, ...], cwd: str, env: dict[str, str]) -> list[str]:
    """Return every problem of a command for a running sandbox."""
    empty = [] if argv else ["argv: must name a program"]
    return [*empty, *_command_problems(argv, cwd), *env_problems(env)]


def is_image(text: str) -> bool:
    """Tell whether `text` is an image reference, or an image's id."""
    return len(text) <= 512 and _IMAGE.fullmatch(text) is not None


def _identity_problems(spec: SandboxSpec) -> list[str]:
    problems = []
    if not is_image(spec.image):
        problems.append(f"image: {spec.image[:80]!r} is not an image reference such as opificia-sandbox:latest")
    for name, value in (("session_id", spec.session_id), ("run_id", spec.run_id)):
        if value and not is_session_id(value):
            problems.append(f"{name}: must be 1 to 64 of a-z, 0-9 and '-'")
    return problems


def _command_problems(argv: tuple[str, ...], cwd: str) -> list[str]:
    problems = []
    if len(argv) > MAX_COMMAND_ARGUMENTS or sum(len(part.encode()) + 1 for part in argv) > MAX_COMMAND_BYTES:
        problems.append(f"command: more than {MAX_COMMAND_ARGUMENTS} arguments or {MAX_COMMAND_BYTES} bytes")
    if any("\0" in part for part in argv):
        problems.append("command: an argument holds a NUL character")
    if argv and not argv[0]:
        problems.append("command: the program's name is empty")
    if not cwd.startswith("/") or "\0" in cwd or len(cwd) > 4_000:
        problems.append("cwd: must be an absolute path in the sandbox")
    return problems


def env_problems(env: dict[str, str]) -> list[str]:
    """Return every problem of environment variables that a caller asks for."""
    problems = []
    if len(env) > MAX_ENV_ENTRIES or sum(len(k.encode()) + len(v.encode()) + 2 for k, v in env.items()) > MAX_ENV_BYTES:
        problems.append(f"env: more than {MAX_ENV_ENTRIES} variables or {MAX_ENV_BYTES} bytes")
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name):
            problems.append(f"env: {name[:80]!r} is not a variable name")
        elif name in RESERVED_ENV or name.upper().startswith(RESERVED_ENV_PREFIX):
            problems.append(f"env: {name} is set by the sandbox host and cannot be replaced")
        if "\0" in value:
            problems.append(f"env: the value of {name[:80]!r} holds a NUL character")
    return problems


def policy_problems(policy: SessionPolicy) -> list[str]:
    """Return every problem of a policy, each a sentence that begins with the field."""
    problems = []
    for field, rules in (("allow", policy.allow), ("deny", policy.deny)):
        if len(rules) > MAX_RULES:
            problems.append(f"{field}: more than {MAX_RULES} rules")
        problems += rule_problems(field, rules[:MAX_RULES])
    problems += budget_problems(policy.egress_budget, policy.model_budget)
    if len(policy.models) > MAX_RULES or any(not 0 < len(model) <= 256 for model in policy.models):
        problems.append(f"models: at most {MAX_RULES} names of 1 to 256 characters")
    return problems


def rule_problems(field: str, rules: tuple[str, ...]) -> list[str]:
    """Return what the gateway's own parser has against rules, so that none is found bad only when it is granted."""
    problems = []
    for rule in rules:
        if len(rule) > MAX_RULE_CHARACTERS:
            problems.append(f"{field}: {rule[:80]!r}… is longer than {MAX_RULE_CHARACTERS} characters")
            continue
        try:
            HostRule.parse(rule)
        except RuleError as error:
            problems.append(f"{field}: {error}")
    return problems


def _resource_problems(spec: SandboxSpec, bounds: Bounds) -> list[str]:
    problems = []
    wanted = spec.resources
    least = max(MIN_MEMORY_BYTES, bounds.min_memory_bytes)
    if wanted.memory_bytes and not least <= wanted.memory_bytes <= bounds.memory_bytes:
        problems.append(f"resources.memory_bytes: must be between {least} and {bounds.memory_bytes}")
    if wanted.cpus and not 0.01 <= wanted.cpus <= bounds.cpus:
        problems.append(f"resources.cpus: must be between 0.01 and {bounds.cpus:g}")
    if wanted.pids and not MIN_PIDS <= wanted.pids <= bounds.pids:
        problems.append(f"resources.pids: must be between {MIN_PIDS} and {bounds.pids}")
    if not 0 <= spec.time_limit_ms <= bounds.session_time_ms:
        problems.append(f"time_limit_ms: must be between 0 and {bounds.session_time_ms}")
    if spec.runtime and (not _RUNTIME.fullmatch(spec.runtime) or spec.runtime not in bounds.runtimes):
        known = ", ".join(bounds.runtimes) or "none"
        problems.append(f"runtime: {spec.runtime[:80]!r} is not among the operator's sandbox.runtimes ({known})")
    return problems


def _folder_problems(in_dir: str, in_roots: tuple[str, ...]) -> list[str]:
    if not in_dir:
        return []
    path = PurePosixPath(in_dir)
    if not path.is_absolute() or "\0" in in_dir or ".." in path.parts:
        return ["in_dir: must be an absolute path without '..'"]
    if not any(path.is_relative_to(root) for root in in_roots):
        return ["in_dir: is not under one of the operator's sandbox.in_roots; upload a copy instead (--in)"]
    return []
