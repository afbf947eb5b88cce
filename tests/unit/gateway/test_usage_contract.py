"""What was used is never negative where it is read, which would fill a budget up again, and its sum can always be told."""

import msgspec
import pytest

from gateway.contract.messages import FromControl, FromGateway, PutGrant, UsageReport
from gateway.contract.policy import Grant, Usage

NEGATIVE = Usage(egress_bytes_up=-1)
LEAST = msgspec.structs.replace(NEGATIVE, egress_bytes_up=0)


@pytest.mark.parametrize("used", [NEGATIVE, Usage(cache_write_tokens=-(1 << 60))])
def test_a_message_with_a_negative_count_is_none_of_the_contract(used: Usage) -> None:
    grant = Grant(session="s1", token_sha256="0" * 64, used=used)
    for message, messages in ((UsageReport("e", "s1", used), FromGateway), (PutGrant(1, grant), FromControl)):
        with pytest.raises(msgspec.ValidationError, match=">= 0"):
            msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=messages)


def test_nothing_used_is_well() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(LEAST), type=Usage) == LEAST


def test_the_sum_of_the_largest_reports_is_one_that_a_grant_can_say() -> None:
    most = Usage(*[(1 << 64) - 1] * len(Usage.__struct_fields__))
    grant = Grant(session="s1", token_sha256="0" * 64, used=most.plus(most))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(PutGrant(1, grant)), type=FromControl) == PutGrant(1, grant)
