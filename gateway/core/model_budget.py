"""A session's model budget: what it used, what is reserved for requests in flight, what it may still ask.

A request is let in while anything is left that is neither used nor reserved, and reserves the most it can cost; when it
ends the reservation is replaced by what was used. So however many come at once, a budget of output is exceeded by no more
than the last reservation. One of input is too, as long as all of a request's input is in its bytes; what a request only names
(an earlier response, a conversation, a file, a URL, what a tool of the provider's finds) is in no reservation, and a budget
is exceeded by what the requests in flight bring in that way. Input is counted with what was read from and written to the
provider's cache: a budget that leaves them out is passed by caching everything.
"""

import enum
import math
from collections import deque
from typing import Final

import msgspec

from gateway.contract.policy import ModelBudget, Usage
from gateway.core.model_refusal import ModelRefusal
from gateway.core.parked import ParkedModel
from gateway.core.usage import Kept, TokenUsage
from gateway.core.verdict import DenyReason

_MINUTE_S: Final = 60.0
# More tokens than any session uses, so that having no limit is no case of its own.
_NO_LIMIT: Final = 1 << 62
# When a slot or a reservation of another request comes free cannot be known; SDKs back off by themselves from here.
_RETRY_SOON_S: Final = 1
# Relayed bytes per output token, where no limit is reserved or what was said last may be old. An event of ~150 bytes carries
# about four tokens, so this is on the high side, as an estimate against an interested party has to be.
_BYTES_PER_OUTPUT_TOKEN: Final = 16
# What a model makes unseen, for requests without a limit that end before anything is said. Large models make 50 to 100.
_OUTPUT_TOKENS_PER_S: Final = 100


class Outcome(enum.Enum):
    """What is known of a request's cost when it ends."""

    # The provider said it, or nothing was spent: the counts are right as they are.
    KNOWN = "known"
    # The reply was whole, but its counts could not be read.
    UNREADABLE = "unreadable"
    # The request was sent, and it or its reply was cut before the provider said what the whole of it used.
    CUT = "cut"
    # The reply was cut after that, or after counts that grow with it (vLLM sends them with every event).
    CUT_LATE = "cut_late"


class Reservation(msgspec.Struct, frozen=True):
    """What is set aside for a request in flight, in tokens.

    While `is_capped` the output is the most that the request allows; otherwise it says none, and this is all that was left.
    """

    input_tokens: int
    output_tokens: int
    is_capped: bool = True


class ModelAccount:
    """What one session asks of models. Times are seconds of one monotonic clock."""

    __slots__ = ("_budget", "_elsewhere", "_input_before", "_most_input", "_most_output", "_output_before", "_reserved_input",
                 "_reserved_output", "_starts", "_tokens", "connections", "in_flight", "kept", "requests")  # fmt: skip

    def __init__(self, budget: ModelBudget, used: Usage) -> None:
        self._tokens = TokenUsage()
        self.requests = 0
        self.in_flight = 0
        self.kept = Kept()
        # Client connections that belong to the session; whoever opens one counts it here.
        self.connections = 0
        self._reserved_input = 0
        self._reserved_output = 0
        self._elsewhere = (0, 0)
        # Starts within the last minute, at most as many as the budget allows.
        self._starts: deque[float] = deque()
        self.update(budget, used)

    def update(self, budget: ModelBudget, used: Usage) -> None:
        """Put a new grant's budget in force. `used` is from earlier epochs; what this epoch used stays."""
        self._budget = budget
        self._most_input = budget.input_tokens or _NO_LIMIT
        self._most_output = budget.output_tokens or _NO_LIMIT
        self._input_before = used.input_tokens + used.cache_read_tokens + used.cache_write_tokens
        self._output_before = used.output_tokens

    def usage(self) -> Usage:
        """Return what was used in this epoch."""
        tokens = self._tokens
        return Usage(
            model_requests=self.requests,
            input_tokens=tokens.input_tokens,
            output_tokens=tokens.output_tokens,
            cache_read_tokens=tokens.cache_read_tokens,
            cache_write_tokens=tokens.cache_write_tokens,
        )

    def parked(self) -> ParkedModel:
        """Return what the next process must know."""
        tokens = self._tokens
        return ParkedModel(
            requests=self.requests,
            input_tokens=tokens.input_tokens,
            output_tokens=tokens.output_tokens,
            cache_read_tokens=tokens.cache_read_tokens,
            cache_write_tokens=tokens.cache_write_tokens,
            starts=tuple(self._starts),
            reserved_input=self._reserved_input,
            reserved_output=self._reserved_output,
        )

    def take_up(self, parked: ParkedModel) -> None:
        """Go on with the counts of the process before."""
        self.requests = parked.requests
        tokens = self._tokens
        tokens.input_tokens = parked.input_tokens
        tokens.output_tokens = parked.output_tokens
        tokens.cache_read_tokens = parked.cache_read_tokens
        tokens.cache_write_tokens = parked.cache_write_tokens
        self._starts = deque(parked.starts)

    def reserve_elsewhere(self, parked: ParkedModel) -> None:
        """Keep what is set aside for requests that go on in the process before."""
        self._reserved_input += parked.reserved_input
        self._reserved_output += parked.reserved_output
        self._elsewhere = (parked.reserved_input, parked.reserved_output)

    def release_elsewhere(self) -> None:
        """The process before has ended, and with it those requests."""
        self._reserved_input -= self._elsewhere[0]
        self._reserved_output -= self._elsewhere[1]
        self._elsewhere = (0, 0)

    def spent_elsewhere(self, usage: Usage) -> None:
        """Count what those requests used."""
        self.requests += usage.model_requests
        tokens = self._tokens
        tokens.input_tokens += usage.input_tokens
        tokens.output_tokens += usage.output_tokens
        tokens.cache_read_tokens += usage.cache_read_tokens
        tokens.cache_write_tokens += usage.cache_write_tokens

    @property
    def limits_tokens(self) -> bool:
        """Whether requests need a reservation, and therefore their bodies read."""
        return bool(self._budget.input_tokens or self._budget.output_tokens)

    def start(self, now: float, concurrent: int, *, metered: bool) -> ModelRefusal | None:
        """Count a request in, unless the session has `concurrent` in flight, its minute is full or its tokens are spent.

        Each successful start is followed by exactly one `finish`.
        """
        if metered:
            used_input, used_output = self._used()
            if used_input >= self._most_input or used_output >= self._most_output:
                return self._exhausted(used_input)
        if self.in_flight >= concurrent:
            return ModelRefusal(
                DenyReason.NO_FREE_SLOT, f"The session has {concurrent} model requests in flight already", _RETRY_SOON_S
            )
        per_minute = self._budget.requests_per_minute
        if per_minute:
            starts = self._starts
            while starts and starts[0] <= now - _MINUTE_S:
                starts.popleft()
            if len(starts) >= per_minute:
                wait = starts[len(starts) - per_minute] + _MINUTE_S - now
                return ModelRefusal(
                    DenyReason.RATE_LIMITED,
                    f"The session may start {per_minute} model requests a minute",
                    max(1, math.ceil(wait)),
                )
            starts.append(now)
        self.in_flight += 1
        self.requests += 1
        return None

    def finish(self) -> None:
        """Count a request out."""
        self.in_flight -= 1

    def reserve(self, input_tokens: int, output_tokens: int | None) -> Reservation | ModelRefusal:
        """Set tokens aside for a request; with `output_tokens` None all that are left. Ends in exactly one `settle`."""
        used_input, used_output = self._used()
        if used_input >= self._most_input or used_output >= self._most_output:
            return self._exhausted(used_input)
        if (
            used_input + self._reserved_input >= self._most_input
            or used_output + self._reserved_output >= self._most_output
        ):
            return ModelRefusal(
                DenyReason.RATE_LIMITED,
                "What is left of the session's token budget is reserved for requests in flight",
                _RETRY_SOON_S,
            )
        is_capped = output_tokens is not None
        if output_tokens is None:
            left = self._most_output - used_output - self._reserved_output if self._budget.output_tokens else 0
            output_tokens = max(0, left)
        self._reserved_input += input_tokens
        self._reserved_output += output_tokens
        return Reservation(input_tokens, output_tokens, is_capped)

    def settle(
        self,
        reservation: Reservation | None,
        usage: TokenUsage,
        outcome: Outcome,
        *,
        relayed_bytes: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Book what a request used, in place of what it had reserved.

        What the provider did not say is charged to a request that had a reservation: the whole reservation when a reply
        was unreadable; when it was cut, all the input reserved unless the provider had said how much, and output as
        `_output_of_cut` has it, at the outside from the bytes that reached the client and the `seconds` that the request
        took. To leave before the last event, or before the first, must not be cheaper than to stay.
        """
        if reservation is not None:
            self._reserved_input -= reservation.input_tokens
            self._reserved_output -= reservation.output_tokens
            if outcome is Outcome.UNREADABLE:
                usage = TokenUsage(reservation.input_tokens, reservation.output_tokens)
            elif outcome is not Outcome.KNOWN:
                said_input = usage.input_tokens or usage.cache_read_tokens or usage.cache_write_tokens
                usage = TokenUsage(
                    input_tokens=usage.input_tokens if said_input else reservation.input_tokens,
                    output_tokens=max(
                        usage.output_tokens, _output_of_cut(reservation, outcome, relayed_bytes, seconds)
                    ),
                    cache_read_tokens=usage.cache_read_tokens,
                    cache_write_tokens=usage.cache_write_tokens,
                )
        total = self._tokens
        total.input_tokens += usage.input_tokens
        total.output_tokens += usage.output_tokens
        total.cache_read_tokens += usage.cache_read_tokens
        total.cache_write_tokens += usage.cache_write_tokens

    def _used(self) -> tuple[int, int]:
        """Return the input and output tokens that were used in all epochs."""
        tokens = self._tokens
        return (
            self._input_before + tokens.input_tokens + tokens.cache_read_tokens + tokens.cache_write_tokens,
            self._output_before + tokens.output_tokens,
        )

    def _exhausted(self, used_input: int) -> ModelRefusal:
        limit, kind = (self._most_input, "input") if used_input >= self._most_input else (self._most_output, "output")
        return ModelRefusal(DenyReason.BUDGET_EXHAUSTED, f"The session's budget of {limit} {kind} tokens is used up")


def _output_of_cut(reservation: Reservation, outcome: Outcome, relayed_bytes: int, seconds: float) -> int:
    """Return what a request that was cut may have made, as far as it was not said.

    What reached the client is no bound: models think unseen (Anthropic shows a summary or nothing, OpenAI nothing), and
    a reply that comes whole may have been all but made. The first count of Anthropic's streams says nothing of it either.
    """
    tokens = relayed_bytes // _BYTES_PER_OUTPUT_TOKEN
    if outcome is Outcome.CUT:
        if reservation.is_capped:
            return reservation.output_tokens
        tokens = max(tokens, math.ceil(seconds * _OUTPUT_TOKENS_PER_S))
    return min(reservation.output_tokens, tokens)
