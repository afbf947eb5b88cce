"""What the doctor finds. One check each: what was looked at, whether it is well, and what to do if it is not."""

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """`part` is `host` or `sandbox`; `check` names what was tried; `remedy` is empty when all is well."""

    part: str
    check: str
    ok: bool
    detail: str = ""
    remedy: str = ""
