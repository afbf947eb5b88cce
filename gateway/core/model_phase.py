"""What a model request waits for, and for how long it may."""

import enum

from gateway.contract.limits import GatewayLimits


class Phase(enum.Enum):
    """What an exchange waits for."""

    HOLDING = "holding"  # the whole body, because a rule must read it
    CONNECTING = "connecting"
    SENDING = "sending"  # more of the request's body
    WAITING = "waiting"  # the reply's first byte
    REPLYING = "replying"
    ENDED = "ended"


def patience_ms(phase: Phase, limits: GatewayLimits) -> int:
    """Return for how many milliseconds a request may stand still in a phase."""
    match phase:
        case Phase.CONNECTING:
            return limits.model_connect_timeout_ms
        case Phase.HOLDING | Phase.WAITING:
            return limits.model_first_byte_timeout_ms
        case _:
            return limits.model_idle_timeout_ms
