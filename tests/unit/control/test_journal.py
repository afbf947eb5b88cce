"""A journal that a power cut or a disk spoilt."""

from pathlib import Path

from control.db.rows import event_row
from control.sessions import journal


def test_a_journal_ends_before_a_document_that_is_no_text(tmp_path: Path) -> None:
    # msgspec passes a document on as it stands, and the database, which takes text only, would refuse it at every start.
    tool = b'{"number":%d,"at":1,"event":{"type":"tool_called","seq":%d,"call":"c","name":"n","arguments":"%b"}}\n'
    path = tmp_path / "events.jsonl"
    path.write_bytes(tool % (1, 1, "ü".encode()) + tool % (2, 2, b"\xff") + tool % (3, 3, b"x"))
    found = journal.read(path)
    assert [event.number for event in found] == [1]
    assert event_row("s", found[0])["data"]
