"""The controller of a deployment test: an inventory for one machine, releases, plays, and what an operator does on it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.host.deploy_machine import Machine, MachineError
from tests.support.paths import CHECKOUT
from tests.support.processes import wait_until

BIN: Final = Path(sys.executable).parent
# A package index on the private engine's own side.
PORT: Final = 8080
INDEX: Final = f"{Machine.outside}:{PORT}"
# What gives back every byte.
ECHO_PORT: Final = 8082
ECHO: Final = f"{Machine.outside}:{ECHO_PORT}"
IMAGE: Final = "opificia-sandbox:latest"
KEY: Final = "sk-test-of-a-deployment"
WELL: Final = ["HTTP/1.1 200", "megabytes came back as they were sent"]

# Until it is told that it is enough: tries the same CONNECT again and again, and beside it sends random bytes through one
# tunnel and compares what comes back. Then it says how often what came out.
_CONNECT: Final = """
import base64, os, socket, sys, threading, time
from urllib.parse import urlsplit
proxy = urlsplit(os.environ["HTTPS_PROXY"])
credentials = base64.b64encode(f"{proxy.username}:{proxy.password}".encode()).decode()
found = {"HTTP/1.1 200": 0, "megabytes came back as they were sent": 0}
def is_enough():
    return os.path.exists("/work/enough")
def count(what):
    found[what] = found.get(what, 0) + 1
def connect(target):
    connection = socket.create_connection((proxy.hostname, proxy.port), timeout=60)
    head = f"CONNECT {target} HTTP/1.1\\r\\nHost: {target}\\r\\nProxy-Authorization: Basic {credentials}\\r\\n\\r\\n"
    connection.sendall(head.encode())
    answer = b""
    while not answer.endswith(b"\\r\\n\\r\\n"):
        byte = connection.recv(1)
        if not byte:
            raise OSError("closed after " + repr(answer))
        answer += byte
    return connection, answer[:12].decode()
def keep_one():
    try:
        connection, _ = connect(sys.argv[2])
        while not is_enough():
            data = os.urandom(1 << 20)
            sending = threading.Thread(target=connection.sendall, args=(data,))
            sending.start()
            back = bytearray()
            while len(back) < len(data):
                piece = connection.recv(1 << 20)
                if not piece:
                    raise OSError("the tunnel was closed")
                back += piece
            sending.join()
            count("megabytes came back as they were sent" if back == data else "other bytes came back")
            time.sleep(0.05)
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(1):
            count("more came back")
    except OSError as error:
        count("tunnel: " + str(error))
keeping = threading.Thread(target=keep_one)
keeping.start()
while not is_enough():
    try:
        connection, answer = connect(sys.argv[1])
        connection.close()
    except OSError as error:
        answer = str(error)
    count(answer)
    time.sleep(0.02)
keeping.join()
print(found, flush=True)
"""


class Site:
    """The controller: an inventory for one machine, releases, and the plays."""

    def __init__(self, target: Machine, scratch: Path) -> None:
        self.machine: Final = target
        self.broken = False
        self._scratch = scratch
        self._bundles = scratch / "dist"
        self._inventory("inventory", [target.name])
        # The same machine by two names, which is two hosts to a controller.
        self._inventory("pair", ["first", "second"])

    def _inventory(self, name: str, hosts: list[str]) -> None:
        target = self.machine
        connection = {
            "ansible_host": target.address,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(target.key),
            "ansible_ssh_common_args": f"-o StrictHostKeyChecking=no -o BatchMode=yes "
            f"-o UserKnownHostsFile={self._scratch}/known_hosts",
        }
        settings = {
            "opificia_bundles": str(self._bundles),
            "control_operators": ["alice"],
            "verify_connect": INDEX,
            # Nothing leads out of this network, and its clock is the machine's that runs the tests.
            "verify_tolerated": ["a package registry is reached", "the model API is reached", "clock"],
            "verify_doctor": False,
            "gateway_model_api_key": KEY,
            "gateway_settings": {
                "egress.trusted": [
                    {"hosts": [target.outside], "ports": [PORT, ECHO_PORT], "network": f"{target.outside}/32"}
                ]
            },
        }
        group = {"hosts": dict.fromkeys(hosts, connection), "vars": settings}
        (self._scratch / f"{name}.json").write_text(json.dumps({"sandbox_hosts": group}))

    def bundle(self, version: str = "") -> None:
        """Make a release of this checkout, under another version if one is given."""
        root = CHECKOUT
        if version:
            root = self._scratch / "next"
            for folder in ("gateway", "control", "systemd", "ansible"):
                shutil.copytree(CHECKOUT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(CHECKOUT / "README.md", root)
            project = (CHECKOUT / "pyproject.toml").read_text()
            (root / "pyproject.toml").write_text(
                re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', project, count=1)
            )
        subprocess.run([root / "ansible/bundle", self._bundles], check=True, stdout=subprocess.DEVNULL)

    def play(self, playbook: str, *arguments: str, **variables: object) -> dict[str, int]:
        """Run a playbook with these variables; return the recap's numbers. Raises AssertionError with what it said."""
        done = self.attempt(playbook, *arguments, variables=variables)
        assert done.returncode == 0, done.stdout[-6000:]
        recap = done.stdout.rpartition("PLAY RECAP")[2]
        return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", recap)}

    def attempt(
        self, playbook: str, *arguments: str, variables: Mapping[str, object], inventory: str = "inventory"
    ) -> "subprocess.CompletedProcess[str]":
        """Run a playbook, whatever comes of it."""
        command = [
            str(BIN / "ansible-playbook"),
            f"--inventory={self._scratch}/{inventory}.json",
            f"--extra-vars={json.dumps(variables)}",
            *arguments,
            str(CHECKOUT / "ansible" / playbook),
        ]
        done = subprocess.run(
            self.machine.engine.in_network(command),
            env={
                **os.environ,
                "ANSIBLE_CONFIG": str(CHECKOUT / "ansible/ansible.cfg"),
                "ANSIBLE_HOME": str(self._scratch / "ansible"),
                # Connections are kept by address, which another run's machine has as well, in a network of its own.
                "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self._scratch / "cp"),
                "ANSIBLE_NOCOLOR": "1",
                "LC_ALL": "C.UTF-8",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        assert KEY not in done.stdout
        return done

    def in_order(self) -> bool:
        """Tell whether control finds everything in order: engine, host, gateway, database."""
        try:
            health = self.machine.run("opificia", "control", "status")
        except MachineError:
            return False
        return bool(json.loads(health)["status"] == "ok")

    def version(self) -> str:
        """Return the release that the machine runs."""
        return Path(self.machine.run("readlink", "-f", "/opt/opificia/current")).name

    def opificia(self, *arguments: str, user: str = "alice") -> str:
        """Run `opificia` on the machine as an operator, who is not root and not in Docker's group."""
        return self.machine.run("runuser", f"--user={user}", "--", "opificia", *arguments)

    def sessions(self) -> dict[str, str]:
        """Return the state of every session."""
        page = json.loads(self.opificia("sessions", "--json"))
        return {session["id"]: session["state"] for session in page["sessions"]}

    def in_sandbox(self, session: str, *argv: str) -> str:
        """Run a command in a running session."""
        return self.opificia("exec", session, "--", *argv)

    def start_session(self, name: str, *command: str) -> "subprocess.Popen[str]":
        """Start a session that may reach the index, and wait until its command runs."""
        arguments = ("--network=open", f"--allow={INDEX}", f"--allow={ECHO}", f"--name={name}", "--quiet")
        process = self.machine.spawn(
            *("runuser", "--user=alice", "--", "opificia", "run", IMAGE, *arguments, "--"), *command
        )
        wait_until(
            lambda: self.sessions().get(name) == "running",
            f"session {name}",
            timeout_s=180,
            give_up=lambda: None if process.poll() is None else process.communicate()[0],
        )
        return process

    def prove(self) -> None:
        """Run a sandbox to its end that reaches what it may, and not the metadata service. Raises MachineError."""
        probe = (CHECKOUT / "ansible/roles/verify/files/probe.py").read_text()
        expected = (f"CONNECT {INDEX}=200", "CONNECT 169.254.169.254:443=403", "GET http://169.254.169.254/=403")
        arguments = ("--network=open", f"--allow={INDEX}", "--quiet", "--", "python3", "-c", probe)
        self.opificia("run", IMAGE, *arguments, *expected)

    def start_connecting(self, name: str) -> "subprocess.Popen[str]":
        """Start a session that connects to INDEX again and again, and keeps one connection to ECHO busy."""
        return self.start_session(name, "python3", "-c", _CONNECT, INDEX, ECHO)

    def found(self, name: str, session: "subprocess.Popen[str]") -> list[str]:
        """End a session that connects; return how its connections fared, each outcome once, as the attached command saw it."""
        self.in_sandbox(name, "touch", "/work/enough")
        said, _ = session.communicate(timeout=120)
        assert session.returncode == 0, said
        return re.findall(r"'([^']*)': [1-9]", said)
