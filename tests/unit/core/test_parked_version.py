"""The version of what one gateway leaves to the next belongs to its form: who changes the one must change the other."""

import hashlib
from typing import Annotated, Any, Final

import msgspec

from gateway.channel import Message
from gateway.core.parked import VERSION, Parked

# A new form gets a new version, and a line of its own here. A release never changes a line that another release had.
DIGESTS: Final = {
    2: "574e7ef58501fdf1ff4090c5606e3cc61547785c049dcbb2229685074441a975",
    3: "888a4129a51e211bad494606277ce67f40e28026f815a70a74d458263c4d25dd",
    4: "7d6fbb3e0243affdc4b0257cfca1162ecc3089c9116f7692c2713f515dfb5832",
}


def form_of(value: Any) -> Any:
    """Return a JSON schema without what is only text."""
    if isinstance(value, dict):
        return {name: form_of(each) for name, each in value.items() if name not in ("description", "title")}
    return [form_of(each) for each in value] if isinstance(value, list) else value


def digest(*kinds: Any) -> str:
    forms = [form_of(msgspec.json.schema(kind)) for kind in kinds]
    return hashlib.sha256(msgspec.json.encode(forms, order="sorted")).hexdigest()


def test_a_record_or_message_of_another_form_has_another_version() -> None:
    assert digest(Parked, Message) == DIGESTS.get(VERSION), "raise VERSION in gateway/core/parked.py, and add it here"


def test_a_changed_field_a_new_one_and_another_limit_are_other_forms_and_a_comment_is_none() -> None:
    def record(number: Any, **more: Any) -> Any:
        return msgspec.defstruct("Record", [("number", number), *more.items()])

    first = digest(record(int))
    assert (
        len(
            {
                first,
                digest(record(float)),
                digest(record(int, other=str)),
                digest(record(Annotated[int, msgspec.Meta(ge=1)])),
            }
        )
        == 4
    )
    commented = record(int)
    commented.__doc__ = "What it says."
    assert digest(commented) == first
