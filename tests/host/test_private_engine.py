"""The private engine itself: it leaves nothing behind, not even when the run that started it is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.engine import PrivateEngine
from tests.support.paths import CHECKOUT
from tests.support.processes import all_pids, command_line, wait_until

RUN_AND_WAIT = """
import sys, time
from tests.support.engine import PrivateEngine
engine = PrivateEngine.acquire()
engine.start()
print(engine.slot, flush=True)
time.sleep(600)
"""


def test_a_killed_run_leaves_no_process_and_its_slot_can_be_used_again() -> None:
    killed = subprocess.Popen([sys.executable, "-c", RUN_AND_WAIT], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    slot = int(killed.stdout.readline())
    folder = f"/run/opificia-engines/{slot}/"
    assert any(folder in command_line(pid) for pid in all_pids())
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    wait_until(lambda: not any(folder in command_line(pid) for pid in all_pids()), "end of the killed run's engine")


def test_engines_side_by_side_do_not_see_each_other(engine: PrivateEngine) -> None:
    with PrivateEngine.acquire() as second:
        assert second.slot != engine.slot
        with_client, without = second.client(), engine.client()
        try:
            with_client.networks.create("only-in-the-second", internal=True)
            assert not without.networks.list(names=["only-in-the-second"])
        finally:
            with_client.close()
            without.close()
    assert second.processes() == []
    assert not Path(f"/run/opificia-engines/{second.slot}").exists()


def test_the_machines_own_network_is_not_touched(engine: PrivateEngine) -> None:
    bridges = {path.name for path in Path("/sys/class/net").iterdir()}
    client = engine.client()
    try:
        network = client.networks.create("bridge-of-a-test", internal=True)
        assert {path.name for path in Path("/sys/class/net").iterdir()} == bridges
        network.remove()
    finally:
        client.close()
