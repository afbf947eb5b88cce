"""What `egress`, `events` and `logs` show of lines that are not as the daemon writes them."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from control.api.types import EventView, LogLine
from control.cli.streams import show_egress, show_events, show_logs, summarize_egress
from control.client import ControlUnavailableError


class Client:
    """Yields these lines."""

    def __init__(self, *lines: bytes) -> None:
        self._lines = lines

    async def _decoded(self, kind: Any) -> AsyncIterator[Any]:
        for line in self._lines:
            yield msgspec.json.decode(line, type=kind)

    def egress(self, _session: str) -> AsyncIterator[Any]:
        return self._decoded(dict[str, Any])

    def events(self, _session: str, *, follow: bool) -> AsyncIterator[Any]:
        return self._decoded(EventView)

    def logs(self, _session: str) -> AsyncIterator[Any]:
        return self._decoded(LogLine)


ODD = b'{"ts":"\\u001b[2J","event":"close","host":"a.example","port":"x","bytes_up":"\\u001b]0;t\\u0007","bytes_down":null}'


async def test_numbers_of_an_egress_log_that_are_none_steer_no_terminal_and_count_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    client: Any = Client(ODD)
    await show_egress(client, "s", follow=False, refused=False, json=False)
    await summarize_egress(client, "s", follow=False, json=True)
    shown, summary = capsys.readouterr().out.splitlines()
    assert shown.isprintable()
    assert "a.example" in shown
    assert msgspec.json.decode(summary)["bytes_up"] == 0


async def test_the_time_of_a_line_steers_no_terminal_either(capsys: pytest.CaptureFixture[str]) -> None:
    client: Any = Client(b'{"number":1,"at":"\\u001b[2J","event":{"type":"launch_requested"}}')
    await show_events(client, "s", follow=False, json=False)
    client = Client(b'{"at":"\\u001b[2J","stream":"stdout","data":"x"}')
    await show_logs(client, "s", ("stdout",), follow=False, timestamps=True, raw=False, json=False)
    assert capsys.readouterr().out == "\\x1b[2J launch_requested\n\\x1b[2J stdout x\n"


async def test_output_that_is_not_in_its_encoding_is_an_error_in_a_sentence() -> None:
    client: Any = Client(b'{"at":"now","stream":"stdout","data":"!","encoding":"base64"}')
    with pytest.raises(ControlUnavailableError, match="not of this version"):
        await show_logs(client, "s", ("stdout",), follow=False, timestamps=True, raw=False, json=False)
