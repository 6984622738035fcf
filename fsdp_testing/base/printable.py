"""Makes foreign text safe for a terminal: characters that would steer the terminal are escaped.

A report, a file name or a rank's output may hold escape sequences that move the cursor, hide a line or set the window's
title. It may also hold characters that reverse the direction of text, so that a line reads as something else.
"""

from __future__ import annotations

import re

_STEERING = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
_STEERS = re.compile(_STEERING)
_STEERS_OR_COLOURS = re.compile(f"(\x1b\\[[0-9;]*m)|{_STEERING}")

_SHOWN, _LONGEST = 100, 3000
_ENDLESS = re.compile(r"[^\s/]{300,}")  # parts of paths are shorter: at most 255 bytes


def printable(text: str, *, colours: bool = False) -> str:
    """Return `text` with control characters, other than tab and end of line, as Python would write them in a string.

    Args:
        text: Foreign text.
        colours: Keep sequences that only set colours, as pytest does in a test's own output.
    """
    text = text.replace("\r\n", "\n")
    if colours:
        return _STEERS_OR_COLOURS.sub(lambda found: found[1] or _written_out(found), text)
    return _STEERS.sub(_written_out, text)


def one_sentence(text: str) -> str:
    """Return a message with foreign names as one line: line ends are escaped, and very long text is cut."""
    line = _ENDLESS.sub(lambda word: f"{word[0][:_SHOWN]}...", printable(text).replace("\n", "\\n"))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - _SHOWN]} ... {line[-_SHOWN:]}"


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
