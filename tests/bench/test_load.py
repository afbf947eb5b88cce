"""The load measures what it says: windows by time, everything counted, and no delay lost, whosever it is."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from bench.load import Client, Route, Server
from bench.peers.model import ModelRoute


@pytest.fixture(params=["C", "Python"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    if request.param == "Python":
        monkeypatch.setattr("bench.load.compiler", lambda: None)
    server = Server(["127.0.0.1:0"])
    yield server
    server.stop()


@pytest.fixture
def provider() -> Iterator[Server]:
    server = Server(["127.0.0.1:0"], program="model")
    yield server
    server.stop()


def test_connections_are_measured_by_time_and_those_outside_of_the_window_are_counted_too(server: Server) -> None:
    options = ["--seconds", "0.3", "--warmup", "0.3", "--concurrency", "4"]
    result = Client("connect", Route(server.addresses[0]), options).run()
    assert result["errors"] == 0, result["first_error"]
    assert result["seconds"] >= 0.3
    assert 0 < result["connections"] < result["tunnels"] == result["total_up"] == result["total_down"]


def test_a_number_of_connections_is_that_number(server: Server) -> None:
    result = Client("connect", Route(server.addresses[0]), ["--total", "50"]).run()
    assert (result["errors"], result["connections"], result["tunnels"]) == (0, 50, 50)
    assert result["latency_us"]["count"] == 50


def test_a_paced_echo_sends_no_more_than_is_due(server: Server) -> None:
    options = ["--seconds", "0.4", "--warmup", "0.2", "--pace", "20"]
    result = Client("echo", Route(server.addresses[0]), options).run()
    assert result["errors"] == 0, result["first_error"]
    assert 0 < result["latency_us"]["count"] <= result["seconds"] * 50 + 2
    # The first byte says what the server is to be.
    assert result["total_up"] - 1 == result["total_down"] >= result["latency_us"]["count"]


def test_requests_are_measured_by_time_and_those_outside_of_the_window_are_counted_too(provider: Server) -> None:
    options = ["--seconds", "0.3", "--warmup", "0.3", "--connections", "4"]
    result = Client("requests", ModelRoute(provider.addresses[0]), options, program="model").run()
    assert result["errors"] == 0, result["first_error"]
    assert result["seconds"] >= 0.3
    assert 0 < result["measured"] < result["finished"] == result["requests"]
    assert result["output_tokens"] == 17 * result["finished"]


def stopped_meanwhile(client: Client, pid: int) -> dict[str, Any]:
    """Run a client; once it measures, stop a process for as long as another client's half a second takes."""

    def on_event(event: str) -> None:
        if event == "start":
            os.kill(pid or client.pid, signal.SIGSTOP)
            try:
                Client("echo", Route(other.addresses[0]), ["--seconds", "0.5", "--warmup", "0"]).run()
            finally:
                os.kill(pid or client.pid, signal.SIGCONT)

    other = Server(["127.0.0.1:0"])
    client.on_event = on_event
    try:
        return client.run()
    finally:
        other.stop()


@pytest.mark.parametrize("whose", ["provider", "load"])
def test_a_request_is_timed_from_when_it_was_due_whoever_was_late(whose: str, provider: Server) -> None:
    options = ["--rate", "100", "--seconds", "2", "--warmup", "0", "--connections", "300"]
    client = Client("rated", ModelRoute(provider.addresses[0]), options, program="model")
    result = stopped_meanwhile(client, provider.pid if whose == "provider" else 0)
    assert result["errors"] == 0, result["first_error"]
    # A quarter of the requests was due while nothing went on, half of these for more than 250 ms.
    assert result["first_us"]["p90"] >= 200_000


@pytest.mark.parametrize("whose", ["provider", "load"])
def test_an_event_is_late_from_when_it_was_due_whoever_was_late(whose: str, provider: Server) -> None:
    route = ModelRoute(provider.addresses[0]).asking("bench=paced:150:20")
    options = ["--pace", "20", "--seconds", "2", "--warmup", "0", "--connections", "1"]
    result = stopped_meanwhile(
        Client("paced", route, options, program="model"), provider.pid if whose == "provider" else 0
    )
    assert result["errors"] == 0, result["first_error"]
    assert result["late_us"]["p90"] >= 200_000
