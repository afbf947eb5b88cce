"""The operator's model key: from a file that is the gateway's alone, or from systemd's credentials; one line, never shown."""

from pathlib import Path

import pytest

from gateway.credentials import CREDENTIAL_NAME, MAX_KEY_BYTES, ModelKey, ModelKeyError

KEY = "sk-operator-0123456789"


def written(file: Path, text: str = KEY + "\n", mode: int = 0o600) -> Path:
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_file_of_the_operators_gives_the_key_without_its_newline(tmp_path: Path) -> None:
    assert ModelKey(str(written(tmp_path / "key")), {})() == KEY.encode()


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o610, 0o604, 0o602, 0o601, 0o644, 0o666])
def test_a_file_that_others_may_use_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    file = written(tmp_path / "key", mode=mode)
    with pytest.raises(ModelKeyError, match="chmod 600"):
        ModelKey(str(file), {})


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_file_that_is_its_owners_alone_is_read(tmp_path: Path, mode: int) -> None:
    assert ModelKey(str(written(tmp_path / "key", mode=mode)), {})() == KEY.encode()


@pytest.mark.parametrize(
    "text",
    [
        f"{KEY}\n{KEY}\n",
        f"{KEY}\r\nx-injected: 1",
        f"{KEY} {KEY}",
        f"{KEY}\t2",
        f"{KEY}\0",
        f"{KEY}\x7f",
        f"{KEY}\xe9",
        "",
        " \n\n",
        "k" * (MAX_KEY_BYTES + 1),
    ],
)
def test_what_is_not_one_line_of_printable_characters_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelKeyError, match="not one line of printable characters") as refused:
        ModelKey(str(written(tmp_path / "key", text)), {})
    assert KEY not in str(refused.value)


def test_the_longest_key_is_read(tmp_path: Path) -> None:
    longest = "k" * MAX_KEY_BYTES
    assert ModelKey(str(written(tmp_path / "key", longest)), {})() == longest.encode()


@pytest.mark.parametrize("mode", [0o400, 0o440])
def test_without_a_file_the_key_is_systemds_credential_of_whatever_mode(tmp_path: Path, mode: int) -> None:
    """Where the unit has a User=, systemd itself may leave the group's bit: an ACL's mask (systemd.exec(5))."""
    assert CREDENTIAL_NAME == "model-api-key"
    written(tmp_path / CREDENTIAL_NAME, mode=mode)
    assert ModelKey("", {"CREDENTIALS_DIRECTORY": str(tmp_path)})() == KEY.encode()


def test_a_credential_that_is_no_key_is_refused(tmp_path: Path) -> None:
    written(tmp_path / CREDENTIAL_NAME, f"{KEY}\n{KEY}\n")
    with pytest.raises(ModelKeyError, match="not one line"):
        ModelKey("", {"CREDENTIALS_DIRECTORY": str(tmp_path)})


def test_a_file_that_is_configured_goes_before_the_credential(tmp_path: Path) -> None:
    written(tmp_path / CREDENTIAL_NAME, "sk-of-the-credential")
    assert ModelKey(str(written(tmp_path / "key")), {"CREDENTIALS_DIRECTORY": str(tmp_path)})() == KEY.encode()


def test_without_file_and_credential_there_is_no_key(tmp_path: Path) -> None:
    assert ModelKey("", {})() == b""
    assert ModelKey("", {"CREDENTIALS_DIRECTORY": str(tmp_path)})() == b""


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_reload_that_fails_keeps_the_key(tmp_path: Path, mode: int) -> None:
    key = ModelKey(str(written(tmp_path / "key")), {})
    written(tmp_path / "key", "sk-new" if mode != 0o600 else "sk-new\nsk-newer", mode)
    with pytest.raises(ModelKeyError):
        key.reload()
    assert key() == KEY.encode()
    written(tmp_path / "key", "sk-new")
    key.reload()
    assert key() == b"sk-new"


def test_the_key_is_not_in_what_is_printed_of_it(tmp_path: Path) -> None:
    assert KEY not in repr(ModelKey(str(written(tmp_path / "key")), {}))
