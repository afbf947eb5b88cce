"""Limits that are part of the product: names, units, defaults. A daemon reads its own from `[limits]`.

Plain units stand in the names; every value can be set smaller, which is how tests reach minutes and gigabytes.
"""

from typing import ClassVar

import msgspec

from gateway.contract.policy import MAX_NUMBER

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


class _Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Whole numbers of at least 1, or 0 where that has a meaning, up to 2^53. Raises ValueError, a line for each problem."""

    may_be_zero: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        least = {name: 0 if name in self.may_be_zero else 1 for name in self.__struct_fields__}
        problems = [f"{name}: must be at least {low}" for name, low in least.items() if getattr(self, name) < low]
        problems += [f"{name}: must be at most 2^53" for name in least if getattr(self, name) > MAX_NUMBER]
        if problems:
            raise ValueError("\n".join(problems))


class GatewayLimits(_Limits, frozen=True):
    """What the gateway enforces."""

    may_be_zero = frozenset(
        {"dns_cache_names", "dns_min_ttl_s", "drain_ms", "egress_waiters_per_session", "resync_wait_ms"}
    )

    # Largest model request, declared or chunked. The provider's own limit is 32 MB.
    max_request_bytes: int = 32 * MIB
    # All request bodies held in memory together, because a rule must read them before they go up.
    max_held_body_bytes: int = 256 * MIB
    egress_idle_ms: int = 300_000
    egress_connect_timeout_ms: int = 15_000
    egress_slot_wait_ms: int = 30_000
    max_egress_log_lines: int = 10_000
    # nginx allows heads of 4 x 8 KiB; a CONNECT head is under 1 KiB.
    head_bytes: int = 16 * KIB
    head_timeout_ms: int = 30_000
    hello_bytes: int = 16 * KIB
    hello_timeout_ms: int = 10_000
    dns_timeout_ms: int = 5_000
    dns_cache_names: int = 1_000
    dns_min_ttl_s: int = 1
    dns_max_ttl_s: int = 300
    dns_queries_per_session: int = 16
    unauthenticated_per_source: int = 64
    unauthenticated_total: int = 4_096
    # Waiters for one session's connection slots; more are refused at once.
    egress_waiters_per_session: int = 1_024
    model_connect_timeout_ms: int = 10_000
    model_first_byte_timeout_ms: int = 120_000
    model_idle_timeout_ms: int = 300_000
    model_total_timeout_ms: int = 3_600_000
    model_requests_per_session: int = 64
    model_upstream_connections: int = 512
    resync_wait_ms: int = 5_000
    drain_ms: int = 30_000


class ControlLimits(_Limits, frozen=True):
    """What control enforces."""

    may_be_zero = frozenset(
        {"keep_ended_bytes", "keep_ended_ms", "keep_ended_sessions", "max_running", "never_launched_ms"}
    )

    hello_timeout_ms: int = 180_000
    stop_grace_ms: int = 10_000
    # A runner that lost its connection has this long to come back before its session ends.
    runner_reconnect_ms: int = 300_000
    session_time_ms: int = 24 * 3_600_000
    # A session that was created and is not launched by then is failed; 0: it may wait for ever.
    never_launched_ms: int = 24 * 3_600_000
    # Records, logs and results of a session after its end; 0: for ever. The oldest go as well when there are more of them,
    # or their folders take more of the disk, than this; 0: no limit.
    keep_ended_ms: int = 30 * 24 * 3_600_000
    keep_ended_sessions: int = 10_000
    keep_ended_bytes: int = 100 * GIB
    out_bytes: int = 2 * GIB
    out_files: int = 100_000
    in_bytes: int = 2 * GIB
    log_bytes: int = 64 * MIB
    runner_frame_bytes: int = 1 * MIB
    max_running: int = 0  # sessions at once; 0: as many as memory and CPUs admit
    max_waiting: int = 1_000
    engine_timeout_ms: int = 60_000
    engine_threads: int = 16
