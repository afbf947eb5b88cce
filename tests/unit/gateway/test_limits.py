"""The limits are part of the product: their names and defaults are asserted once, here."""

from pathlib import Path

import msgspec

from gateway.contract.limits import ControlLimits, GatewayLimits

CONFIGURATION = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_gateways_limits_have_the_released_defaults() -> None:
    assert (
        msgspec.structs.asdict(GatewayLimits()).items()
        >= {
            "max_request_bytes": 32 * 1024**2,
            "egress_idle_ms": 5 * 60_000,
            "egress_connect_timeout_ms": 15_000,
            "egress_slot_wait_ms": 30_000,
            "max_egress_log_lines": 10_000,
            "head_bytes": 16 * 1024,
            "head_timeout_ms": 30_000,
            "hello_bytes": 16 * 1024,
            "hello_timeout_ms": 10_000,
            "dns_timeout_ms": 5_000,
            "dns_cache_names": 1_000,
            "dns_min_ttl_s": 1,
            "dns_max_ttl_s": 300,
            "unauthenticated_per_source": 64,
            "unauthenticated_total": 4_096,
            "model_connect_timeout_ms": 10_000,
            "model_first_byte_timeout_ms": 120_000,
            "model_idle_timeout_ms": 300_000,
            "model_total_timeout_ms": 60 * 60_000,
            "drain_ms": 30_000,
        }.items()
    )


def test_controls_limits_have_the_released_defaults() -> None:
    assert (
        msgspec.structs.asdict(ControlLimits()).items()
        >= {
            "hello_timeout_ms": 3 * 60_000,
            "stop_grace_ms": 10_000,
            "out_bytes": 2 * 1024**3,
            "out_files": 100_000,
            "log_bytes": 64 * 1024**2,
        }.items()
    )


def test_every_limit_of_the_gateway_is_documented_with_its_default() -> None:
    text = CONFIGURATION.read_text()
    for field in msgspec.structs.fields(GatewayLimits):
        assert f"| `{field.name}` | {field.default:_} |" in text
