"""Text from a sandbox on its way to a terminal: nothing that it prints may steer the terminal or hide what stands there.

Escape sequences can move the cursor, change the window's title, and on some terminals type on the user's behalf
(CVE-2003-0063 and its successors); bidirectional controls reorder what is read (CVE-2021-42574).
"""

import codecs
import re
from typing import Final

# C0 without tab and newline, DEL, C1, line and paragraph separators, and Unicode's bidirectional controls.
_UNSAFE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]"
)


def escape(text: str) -> str:
    """Return `text` with every character that could steer a terminal made visible; lines stay lines."""
    return _UNSAFE.sub(_visible, text)


def escape_line(text: str) -> str:
    """Return `text` as one line: for tables and messages."""
    return escape(text).replace("\n", "\\n").replace("\t", " ")


def escape_json(encoded: bytes) -> bytes:
    """Return a JSON document that says the same and holds no such character: JSON itself escapes only some of them."""
    if encoded.isascii() and b"\x7f" not in encoded:
        return encoded
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded.decode()).encode()


def _visible(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class Escaper:
    """Escapes a stream of bytes piece by piece, whatever the pieces cut in two.

    A carriage return ends a line: it would otherwise overwrite what stands there. Bytes that are not UTF-8 are shown.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._returned = False

    def feed(self, data: bytes, *, final: bool = False) -> str:
        """Return the text of the next bytes."""
        text = self._decoder.decode(data, final)
        if self._returned:
            text = "\r" + text
        self._returned = text.endswith("\r") and not final
        if self._returned:
            text = text[:-1]
        return escape(text.replace("\r\n", "\n").replace("\r", "\n"))
