"""Makes foreign text safe for a terminal: what would steer it is written out.

A report, a file name or what a rank wrote may hold escape sequences that move the cursor, hide a line or set the title of
the window; and characters that turn the direction of writing round, so that a line reads as what it is not.
"""

from __future__ import annotations

import re

_STEERING = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
_STEERS = re.compile(_STEERING)
_STEERS_OR_COLOURS = re.compile(f"(\x1b\\[[0-9;]*m)|{_STEERING}")

_SHOWN, _LONGEST = 100, 3000
_ENDLESS = re.compile(r"[^\s/]{300,}")  # no part of a path is as long: 255 bytes are the most


def printable(text: str, *, colours: bool = False) -> str:
    """Return `text` with control characters, other than tab and end of line, as Python would write them in a string.

    Args:
        text: From elsewhere.
        colours: Leave sequences alone that only set colours: what a test itself prints, as pytest leaves them.
    """
    text = text.replace("\r\n", "\n")
    if colours:
        return _STEERS_OR_COLOURS.sub(lambda found: found[1] or _written_out(found), text)
    return _STEERS.sub(_written_out, text)


def one_sentence(text: str) -> str:
    """Return a message in which names of others may stand as one line: ends of line written out, what is endless cut."""
    line = _ENDLESS.sub(lambda word: f"{word[0][:_SHOWN]}...", printable(text).replace("\n", "\\n"))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - _SHOWN]} ... {line[-_SHOWN:]}"


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
