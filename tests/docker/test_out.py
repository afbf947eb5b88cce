"""/out: its limits are the sandbox's to meet, its contents are hostile, and what is collected is bounded."""

import asyncio
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from control.docker.service import DockerService
from control.docker.types import EngineError, NotFoundError, OutLimits
from control.docker.volumes import OutVolumes, volume_name
from gateway.contract.limits import KIB, MIB
from tests.docker.sandboxes import HOST_ID, Sandboxes
from tests.support import identities
from tests.support.engine import PrivateEngine

GENEROUS = OutLimits(bytes=64 * MIB, entries=10_000)


async def _names(service: DockerService, container: str, destination: Path, limits: OutLimits = GENEROUS) -> list[str]:
    summary = await service.archive_out(container, destination, limits)
    with tarfile.open(destination) as tar:
        names = tar.getnames()
    assert summary.entries == len(names)
    assert summary.bytes == destination.stat().st_size
    return names


async def test_a_full_out_is_the_sandboxs_own_error_and_what_fitted_is_kept(
    sandboxes: Sandboxes, service: DockerService, tmp_path: Path
) -> None:
    ended = await sandboxes.run(
        "dd if=/dev/zero of=/out/big bs=1M count=100 2>&1 | grep -o 'No space left on device'; stat -c %s /out/big"
    )
    message, size = ended.stdout.splitlines()
    assert message == "No space left on device"
    # The session has its 16 MiB whole; the file system's own bookkeeping comes on top.
    assert 16 * MIB <= int(size) <= 34 * MIB
    (sandbox,) = sandboxes.launched
    assert await _names(service, sandbox.container, tmp_path / "out.tar") == [".", "./big"]


async def test_files_in_out_are_limited_in_number(sandboxes: Sandboxes) -> None:
    ended = await sandboxes.run("for n in $(seq 1000); do : > /out/$n || break; done 2>&1 | tail -1; ls /out | wc -l")
    message, count = ended.stdout.splitlines()
    assert "No space left on device" in message
    assert 150 <= int(count) <= 210


async def test_out_is_empty_at_first_and_its_owner_is_the_sandbox(sandboxes: Sandboxes) -> None:
    ended = await sandboxes.run("ls -A /out; stat -c '%u %g %a' /out")
    assert ended.stdout == "60610 60610 755\n"


async def test_hostile_contents_are_collected_as_they_are_and_nothing_is_followed(
    sandboxes: Sandboxes, service: DockerService, tmp_path: Path
) -> None:
    script = r"""
cd /out
ln -s /etc/shadow shadow
ln -s / root
ln -s ../../../../etc up
ln -s loop loop
mkfifo fifo
python3 - <<'END'
import os, socket
open(b"/out/line\nbreak", "w").close()
open(b"/out/byte\xff", "w").close()
open("/out/-rf *", "w").close()
socket.socket(socket.AF_UNIX).bind("/out/socket")
os.makedirs("/out/" + "/".join("d" * 60))
os.truncate(os.open("/out/zzz-sparse", os.O_CREAT | os.O_RDWR), 1 << 40)
with open("/out/script", "w") as f: os.fchmod(f.fileno(), 0o6755)
END
ln shadow hard
"""
    ended = await sandboxes.run(script)
    assert ended.exit.exit_code == 0, ended.stderr
    (sandbox,) = sandboxes.launched
    destination = tmp_path / "out.tar"
    summary = await service.archive_out(sandbox.container, destination, GENEROUS)
    assert summary.truncated  # at the sparse file, the last by name
    with tarfile.open(destination) as tar:
        members = {member.name: member for member in tar}
    # The two names of one link; the second refers to the first.
    assert members["./hard"].linkname == "/etc/shadow"
    assert members["./shadow"].linkname == "./hard"
    assert members["./root"].issym()
    assert members["./loop"].issym()
    assert members["./fifo"].isfifo()
    assert {"./line\nbreak", "./byte\udcff", "./-rf *", "./" + "/".join("d" * 60)} <= set(members)
    assert not any("shadow/" in name or name.startswith("./root/") for name in members)
    assert summary.bytes < 1 * MIB


async def test_300_folders_deep_are_collected(sandboxes: Sandboxes, service: DockerService, tmp_path: Path) -> None:
    await sandboxes.run("cd /out; for n in $(seq 150); do mkdir d && cd d || exit 1; done; echo end > end")
    (sandbox,) = sandboxes.launched
    names = await _names(service, sandbox.container, tmp_path / "out.tar")
    assert names[-1] == "./" + "d/" * 150 + "end"


async def test_a_bound_on_entries_or_bytes_cuts_the_archive_and_says_so(
    sandboxes: Sandboxes, service: DockerService, tmp_path: Path
) -> None:
    await sandboxes.run("for n in a b c d; do head -c 10000 /dev/zero > /out/$n; done")
    (sandbox,) = sandboxes.launched
    destination = tmp_path / "out.tar"
    few = OutLimits(bytes=64 * MIB, entries=3)
    assert await _names(service, sandbox.container, destination, few) == [".", "./a", "./b"]
    assert (await service.archive_out(sandbox.container, destination, few)).truncated
    small = OutLimits(bytes=32 * KIB, entries=100)
    assert await _names(service, sandbox.container, destination, small) == [".", "./a", "./b"]
    assert (await service.archive_out(sandbox.container, destination, small)).truncated
    assert not list(tmp_path.glob("*.partial"))


async def test_an_archive_that_cannot_be_written_is_an_error_with_the_path(
    sandboxes: Sandboxes, service: DockerService, tmp_path: Path
) -> None:
    await sandboxes.run("true")
    (sandbox,) = sandboxes.launched
    with pytest.raises(EngineError, match="no-such-folder"):
        await service.archive_out(sandbox.container, tmp_path / "no-such-folder/out.tar", GENEROUS)


async def test_results_outlive_a_reboot_that_takes_the_loop_devices(
    sandboxes: Sandboxes, service: DockerService, tmp_path: Path
) -> None:
    await sandboxes.run("echo kept > /out/result")
    (sandbox,) = sandboxes.launched
    link = Path(f"/dev/opificia/{HOST_ID}-{sandbox.session}")
    subprocess.run(["losetup", "--detach", str(link.resolve())], check=True)
    link.unlink()
    assert await _names(service, sandbox.container, tmp_path / "out.tar") == [".", "./result"]


async def test_making_a_volume_again_keeps_what_is_in_it(
    sandboxes: Sandboxes, service: DockerService, tmp_path: Path
) -> None:
    await sandboxes.run("echo kept > /out/result")
    (sandbox,) = sandboxes.launched
    assert await service.create_out_volume(sandbox.session, 16 * MIB, 200) == f"opificia-out-{sandbox.session}"
    assert await _names(service, sandbox.container, tmp_path / "out.tar") == [".", "./result"]


async def test_a_removed_volume_leaves_no_device_and_no_file(
    sandboxes: Sandboxes, service: DockerService, engine: PrivateEngine
) -> None:
    sandbox = await sandboxes.launch("echo x > /out/x")
    await sandbox.ended()
    assert sandbox.session in await service.out_volumes()
    await service.remove(sandbox.container)
    await service.remove_out_volume(sandbox.session)
    await service.remove_out_volume(sandbox.session)
    assert sandbox.session not in await service.out_volumes()
    assert not os.path.lexists(f"/dev/opificia/{HOST_ID}-{sandbox.session}")
    listing = await service._volumes._helper.execute(["ls", "/volumes"])
    assert f"{HOST_ID}-{sandbox.session}" not in listing.stdout
    loops = subprocess.run(["losetup", "--list", "--output", "BACK-FILE"], check=True, capture_output=True, text=True)
    assert f"{HOST_ID}-{sandbox.session}" not in loops.stdout


async def test_a_volume_that_no_helper_is_there_to_take_down_stays_known(service: DockerService) -> None:
    volumes = OutVolumes(service._engine, "another-host")
    await volumes.declare("left")
    try:
        with pytest.raises(NotFoundError, match="helper does not run"):
            await volumes.remove("left")
        assert await volumes.sessions() == ["left"]
    finally:
        await service._engine.call(lambda api: api.remove_volume(volume_name("left")))


async def test_volumes_are_made_at_the_same_time_on_devices_of_their_own(service: DockerService) -> None:
    sessions = [f"many{number}" for number in range(8)]
    try:
        await asyncio.gather(*(service.create_out_volume(session, MIB, 20) for session in sessions))
        devices = {Path(f"/dev/opificia/{HOST_ID}-{session}").resolve() for session in sessions}
        assert len(devices) == len(sessions)
    finally:
        await asyncio.gather(*(service.remove_out_volume(session) for session in sessions))


async def test_an_unprivileged_control_with_the_engines_socket_can_do_it_all(
    engine: PrivateEngine, sandboxes: Sandboxes, tmp_path: Path
) -> None:
    """Everything above ran as root; this runs as control's own user, a member of the socket's group."""
    program = """
import asyncio, sys
from pathlib import Path
from control.docker.service import DockerService
from control.docker.types import OutLimits
from control.plan.container import DockerSettings
async def main():
    service = DockerService(DockerSettings(socket=sys.argv[1]), "test-host")
    await service.create_out_volume("unprivileged", 1 << 20, 20)
    summary = await service.archive_out(sys.argv[2], Path(sys.argv[3]), OutLimits(1 << 20, 100))
    await service.remove_out_volume("unprivileged")
    await service.close()
    print(summary.entries)
asyncio.run(main())
"""
    await sandboxes.run("echo x > /out/x")
    (sandbox,) = sandboxes.launched
    folder = tmp_path / "session"
    folder.mkdir()
    os.chown(folder, identities.CONTROL, identities.CONTROL)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_mode & 0o005 != 0o005:
            parent.chmod(parent.stat().st_mode | 0o055)
    process = await asyncio.create_subprocess_exec(
        *("setpriv", f"--reuid={identities.CONTROL}", f"--regid={identities.CONTROL}"),
        f"--groups={identities.ENGINE_GROUP}",
        *(_python(), "-c", program, str(engine.socket), sandbox.container, str(folder / "out.tar")),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await process.communicate()
    assert printed == b"2\n"
    assert (folder / "out.tar").stat().st_uid == identities.CONTROL


def _python() -> str:
    import sys

    return sys.executable
