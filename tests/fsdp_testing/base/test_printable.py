"""Nothing that steers a terminal comes through; all else does."""

from __future__ import annotations

import pytest

from fsdp_testing.base.printable import one_sentence, printable

RED = "\x1b[31m"


@pytest.mark.parametrize("code", [*range(0x20), 0x7F, 0x80, 0x9B, 0x9F, 0x202E, 0x2066])
def test_what_steers_is_written_out(code: int) -> None:
    shown = printable(f"a{chr(code)}b")
    if chr(code) in "\t\n":
        assert shown == f"a{chr(code)}b"
    else:
        assert shown == (f"a\\x{code:02x}b" if code < 0x100 else f"a\\u{code:04x}b")


def test_text_in_any_language_stays() -> None:
    text = "é 日本語 \U0001f600 \\ {} tab\tline\nend\n"
    assert printable(text) == text
    assert printable("one\r\ntwo") == "one\ntwo"


def test_colours_stay_where_a_test_itself_prints() -> None:
    assert printable(f"{RED}x\x1b[0m\x1b[2J\x1b]0;t\x07", colours=True) == f"{RED}x\x1b[0m\\x1b[2J\\x1b]0;t\\x07"
    assert printable(f"{RED}x") == "\\x1b[31mx"


def test_a_message_with_names_of_others_is_one_line_and_ends() -> None:
    line = one_sentence("a.json: expected one, got\n" + "k" * 1000 + " and " + "more " * 1000 + "Fix it.")
    assert line.startswith(r"a.json: expected one, got\n" + "k" * 90)
    assert line.endswith("more Fix it.")
    assert len(line) < 3100 and "k" * 200 not in line
