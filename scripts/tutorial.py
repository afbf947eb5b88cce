"""Records docs/tutorial.md: an operator's day, every command really run on a private host, its output as it came.

    python -m scripts.tutorial     needs root on a Debian machine where scripts/setup has run; leaves nothing running

The host's own folder is left out of paths (`/run/opificia/…`, as in production), and blanks at the ends of lines.
"""

import asyncio
import contextlib
import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.dns_server import DnsServer, Records
from tests.support.engine import PrivateEngine
from tests.support.host import PrivateHost, stand_in_model
from tests.support.mirrors import registry_addresses
from tests.support.paths import CHECKOUT
from tests.support.processes import wait_until

TARGET: Final = CHECKOUT / "docs/tutorial.md"
FILES_HOST: Final = "files.example.com"
FILES_PORT: Final = 8080

INTRODUCTION: Final = f"""# A day with Opificia

Made by `python -m scripts.tutorial`: every command was run as it stands here, on a host made for the recording, and what follows it is what it
said. `{FILES_HOST}` is a file server of the recording's own; everything else is what you get on your machines.

The host is installed and its daemons run ([configuration.md](configuration.md)); you are in the group of the API's socket. An agent's job is to
add up prices: the job lies in `project/`, the prices on a file server.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """What a reader is told, and the commands that are run."""

    text: str
    commands: tuple[str, ...]


STEPS: Final = (
    Step(
        """## Is the host in order?

`doctor` starts two sandboxes and tries from inside what an attacker would try; then it looks at the host. Each ✗ has a remedy. (The machine
of a recording need not have all of a host's luxuries, such as a synchronized clock.)""",
        ("opificia doctor --config host/control.toml --gateway-config host/gateway.toml",),
    ),
    Step(
        """## Run a job

What a session may do on the network stands in a policy file. This one allows package registries and nothing else, 50 MB and no model.""",
        (
            "cat policy.toml",
            "cat project/job.sh",
            "opificia run opificia-sandbox:latest --name first --policy policy.toml --in project -- sh /in/job.sh",
        ),
    ),
    Step(
        "The exit code is the job's own. What happened?",
        ("opificia sessions", "opificia events first", "opificia logs first"),
    ),
    Step(
        """## Explain a refusal

curl says 403. The gateway wrote down why, and `egress check` says what it would decide now: under the policy of a session, or of a file. The
running gateway answers, with its own rules, name servers and addresses; it connects to nothing.""",
        (
            "opificia egress first",
            f"opificia egress check --session first {FILES_HOST}:{FILES_PORT}",
        ),
    ),
    Step(
        "Allow the host, with this port only, and ask again before running anything; the cloud's metadata stays closed whatever a file says.",
        (
            f"""echo 'allow = ["{FILES_HOST}:{FILES_PORT}", "169.254.169.254"]' >> policy.toml""",
            f"opificia egress check --policy policy.toml {FILES_HOST}:{FILES_PORT} 169.254.169.254:80",
        ),
    ),
    Step(
        "## Run it again",
        (
            "opificia run opificia-sandbox:latest --name second --policy policy.toml --in project -- sh /in/job.sh",
            "opificia egress second --summary",
        ),
    ),
    Step(
        """## Fetch the results

What a session leaves in `/out` is kept with it.""",
        ("opificia out ls second", "opificia out get second results", "cat results/total.txt"),
    ),
    Step(
        """## Look after a session that runs

A third session runs in another terminal: `opificia run opificia-sandbox:latest --name long -- sleep 600`.""",
        (
            "opificia sessions --state running",
            "opificia exec long -- sh -c 'id; ls -ld /work; touch /etc/x'",
            "opificia gateway status",
            "opificia stop long --wait",
            "opificia sessions",
        ),
    ),
    Step(
        """## When something is wrong

A request that cannot be met is refused with all that is wrong with it.""",
        (
            "opificia run 'Bad Image' --name Mine --allow 'a b' --memory 1k -- true",
            "opificia show nobody",
            "OPIFICIA_CONTROL=unix:/nowhere.sock opificia sessions",
        ),
    ),
)

POLICY: Final = """network = "registries"
egress_budget = { bytes = 50_000_000, connections = 8 }
models = ["none"]
"""
JOB: Final = f"""set -e
curl -fsS http://{FILES_HOST}:{FILES_PORT}/prices.txt -o /work/prices.txt
python3 -c 'print(sum(map(int, open("/work/prices.txt"))))' > /out/total.txt
echo "the total is in /out/total.txt"
"""


@contextlib.contextmanager
def file_server(folder: Path) -> Iterator[None]:
    """Serve a folder on a port of this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", FILES_PORT), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


@contextlib.contextmanager
def name_server() -> Iterator[str]:
    """Run a name server that knows the file server and the registries; yields its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> DnsServer:
        server = await DnsServer().__aenter__()
        server.script(FILES_HOST, Records(("127.0.0.1",)))
        for host, addresses in registry_addresses().items():
            server.script(host, Records(tuple(map(str, addresses))))
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield server.address
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Recorder:
    """Runs commands in a folder, as an operator on the host would, and keeps what they say."""

    def __init__(self, host: PrivateHost, folder: Path) -> None:
        self._host = host
        self._folder = folder
        commands = folder.parent / "bin"
        commands.mkdir()
        opificia = commands / "opificia"
        opificia.write_text(f'#!/bin/sh\nPYTHONPATH="{CHECKOUT}" exec "{sys.executable}" -m control.cli "$@"\n')
        opificia.chmod(0o755)
        self._environment = {
            **{name: os.environ[name] for name in ("LANG", "SSL_CERT_FILE") if name in os.environ},
            "HOME": str(folder),
            "OPIFICIA_CONTROL": host.api,
            "PATH": f"{commands}:{os.environ['PATH']}",
        }

    def run(self, command: str) -> str:
        """Run a command; return it with all that it said and, where it failed, its exit code."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        lines = [f"$ {command}", *(line.rstrip() for line in done.stdout.splitlines())]
        if done.returncode:
            lines.append(f"(exit code {done.returncode})")
        print("\n".join(lines), flush=True)
        return "\n".join(lines).replace(str(self._host.root), "")

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """Run a command beside the others."""
        return subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def record(host: PrivateHost, folder: Path) -> str:
    """Take all steps and return the document."""
    (folder / "project").mkdir(parents=True)
    (folder / "policy.toml").write_text(POLICY)
    (folder / "project/job.sh").write_text(JOB)
    (folder / "host").symlink_to(host.root / "etc")
    recorder = Recorder(host, folder)
    parts = [INTRODUCTION]
    for step in STEPS:
        beside = None
        if "terminal" in step.text:
            beside = recorder.start("opificia run opificia-sandbox:latest --name long -- sleep 600")
            wait_until(lambda: "long" in host.cli("sessions", "--state", "running").stdout, "the third session")
        blocks = [f"```\n{recorder.run(command)}\n```\n" for command in step.commands]
        if beside is not None:
            beside.wait(60)
        parts.append("\n".join([f"{step.text}\n", *blocks]))
    return "\n".join(parts)


def main() -> int:
    """Record, and write the document."""
    engine = PrivateEngine.acquire()
    with contextlib.ExitStack() as stack:
        stack.enter_context(engine)
        model = stack.enter_context(stand_in_model())
        served = engine.scratch / "served"
        served.mkdir()
        (served / "prices.txt").write_text("120\n380\n250\n")
        stack.enter_context(file_server(served))
        # The file server is this machine's, which a gateway in production never opens.
        egress = {"allow_loopback": True, "nameservers": [stack.enter_context(name_server())]}
        host = PrivateHost(engine, model, gateway={"egress": egress})
        stack.callback(host.stop)
        host.start()
        text = record(host, engine.scratch / "operator/home")
    TARGET.write_text(text)
    print(f"{TARGET.relative_to(CHECKOUT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
