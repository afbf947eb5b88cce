"""Why a call about a session is refused, beside what admission and the store have against it."""


class InvalidSpecError(Exception):
    """The spec cannot be accepted; `problems` says why, one sentence each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class NoSuchSessionError(Exception):
    """There is no session with this id."""


class WrongStateError(Exception):
    """The session's state does not allow this; the message says both."""
