"""Who used the CPU: children that ended, threads, and an order of peers that favours none."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

from bench.load import Server
from bench.measure import Window
from bench.peers import ALL
from bench.processes import cpu_seconds, family, thread_seconds
from bench.rounds import shuffled

_WORK = """
import os, sys, threading, time
def work():
    while time.thread_time() < 0.2:
        pass
"""
_FORKING = f"""{_WORK}
if os.fork() == 0:
    work()
    os._exit(0)
os.wait()
print("done", flush=True)
sys.stdin.read()
"""
_THREADS = f"""{_WORK}
def first():
    work()
    done.wait()
    sys.stdin.read()
done = threading.Barrier(3)
for _ in range(2):
    threading.Thread(target=first).start()
done.wait()
print("done", flush=True)
sys.stdin.read()
"""


_SERVING = f"""{_WORK}
print("done", flush=True)
while sys.stdin.readline():
    if os.fork() == 0:
        work()
        os._exit(0)
    os.wait()
    print("done", flush=True)
"""


@contextmanager
def worker(program: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program that says when its work is done."""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        yield process


def ask(process: "subprocess.Popen[bytes]") -> bytes:
    """Give a program a line, and return its answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"work\n")
    process.stdin.flush()
    return process.stdout.readline()


def test_the_work_of_a_child_that_has_ended_is_its_parents() -> None:
    with worker(_FORKING) as process:
        assert family(process.pid) == [process.pid]
        assert cpu_seconds([process.pid]) >= 0.19


def test_a_peer_that_forks_for_each_connection_does_not_look_free() -> None:
    with worker(_SERVING) as peer, worker(_THREADS) as there:
        server = cast(Server, SimpleNamespace(pid=there.pid))
        window = Window([peer.pid], server)
        window.on_event("start")
        assert ask(peer) == b"done\n"
        window.on_event("stop")
        result = {"mode": "connect", "load_cpu_s": 0.0, "seconds": 1.0}
        for settled in (False, True):
            usage = window.usage(result, settled=settled)
            assert usage.peer >= 0.19
            # Nobody knows of which thread it was.
            assert usage.thread < 0.1


def test_a_process_is_counted_once_however_it_is_named() -> None:
    with subprocess.Popen(["sh", "-c", "cat; true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert ask(shell) == b"work\n"
        first, child = family(shell.pid)
        assert (first, family(child, shell.pid)) == (shell.pid, [child, shell.pid])


def test_each_thread_is_told_from_the_others() -> None:
    with worker(_THREADS) as process:
        used = thread_seconds([process.pid])
        assert sum(seconds >= 0.19 for seconds in used.values()) == 2
        assert abs(cpu_seconds([process.pid]) - sum(used.values())) < 0.1


def test_peers_answer_in_another_order_each_round_and_in_the_same_in_each_run() -> None:
    peers = [kind() for kind in ALL]
    orders = [[peer.name for peer in shuffled(peers, number)] for number in range(6)]
    assert orders == [[peer.name for peer in shuffled(peers, number)] for number in range(6)]
    assert len({tuple(order) for order in orders}) == 6
    # In a rotation each follows the same one in every round but one.
    pairs = {pair for order in orders for pair in itertools.pairwise(order)}
    assert len(pairs) > 3 * (len(peers) - 1)
