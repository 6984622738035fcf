"""Checks the pages that users read: proselint, with the words that this project avoids (ci/words.toml).

    python ci/prose.py           # words to avoid, long sentences and too many words are errors (`tox -e lint`)
    python ci/prose.py --words   # and the words of each page are printed, code included

An allowance is what a page had when the rule came: it may only fall, so one that is too high is an error as well.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RULES = tomllib.loads((ROOT / "ci" / "words.toml").read_text(encoding="utf-8"))
LONGEST = 30
"""Words of a sentence."""
MOST_WORDS = 25_000
"""Words of all pages together, code included; rules of tables and other marks alone are none."""
_CODE = re.compile(r"^```.*?^```$|<!--.*?-->|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_BREAK = re.compile(r"(?<=[.?!:])[\s)*]+(?=[A-Z*\[])|\n\s*\n|\n(?=\s*(?:[-#|>]|\d+\. ))|\|")


def pages() -> Iterator[Path]:
    """Pages written for users by hand; accounts of single findings and what scripts make are left out."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"))
    made = {ROOT / name for name in RULES["made"]}
    for folder in ("docs", "docs/tutorials"):
        yield from sorted(path for path in (ROOT / folder).glob("*.md") if path not in made)


def prose(text: str) -> str:
    """Return the text with code, comments and targets of links blank; lines stay where they are.

    Code within a line becomes a word with a capital: a sentence may begin with it.
    """
    blank = _CODE.sub(
        lambda code: re.sub(r"[^\n]", " ", code[0]) if "\n" in code[0] else "X" + "x" * (len(code[0]) - 1), text
    )
    return re.sub(r"\]\([^)\n]*\)", lambda link: "]" + " " * (len(link[0]) - 1), blank)


def long_sentences(text: str) -> list[str]:
    """Return the sentences of more than `LONGEST` words; a cell of a table and a point of a list end one."""
    sentences = (" ".join(part.split()) for part in _BREAK.split(prose(text)))
    return [sentence for sentence in sentences if len(re.findall(r"\w[\w'-]*", sentence)) > LONGEST]


def words(text: str) -> list[str]:
    """Return `LINE: WORD: what to say` for each word of ours, and each cliché and redundancy that proselint knows."""
    from proselint.config import DEFAULT
    from proselint.registry import CheckRegistry
    from proselint.registry.checks import Check, CheckFlags, engine, types
    from proselint.tools import LintFile

    registry = CheckRegistry()
    if not registry.checks:
        from proselint.checks import __register__

        registry.register_many(__register__)
        for pattern, advice in RULES["words"].items():
            rule = types.ExistenceSimple(pattern=rf"\b(?:{pattern})\b")
            flags = CheckFlags(allow_quotes=True)
            registry.register(Check(rule, engine.Fancy(), "ours", advice.replace("{", "{{"), flags))
    chosen = dict.fromkeys(RULES["proselint"], True)
    found = LintFile("page", prose(text)).lint({**DEFAULT, "checks": {"ours": True, **chosen}, "max_errors": 10_000})
    lines = [f"\n{prose(text)}\n"[slice(*result.check_result.span)].strip() for result in found]
    return [
        f"{result.pos[0]}: {' '.join(line.split())}: {result.check_result.message}"
        for result, line in zip(found, lines, strict=True)
    ]


def main(show_words: bool) -> int:
    """Print what is wrong; return 1 if anything is."""
    wrong, counts = [], {}
    for path in pages():
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        found, allowed = words(text), RULES["allowed"].get(name, 0)
        if len(found) > allowed:
            wrong += [f"{name}:{line}" for line in found]
        elif len(found) < allowed:
            wrong.append(f"{name}: expected allowed = {len(found)} in ci/words.toml, got {allowed}: lower it")
        wrong += [f"{name}: more than {LONGEST} words: {sentence}" for sentence in long_sentences(text)]
        counts[name] = sum(1 for part in text.split() if re.search(r"\w", part))
    total = sum(counts.values())
    if total > MOST_WORDS:
        wrong.append(f"expected at most {MOST_WORDS:,} words in {len(counts)} pages, got {total:,}: shorten some")
    print(*wrong, sep="\n")
    print(f"{total:,} words in {len(counts)} pages")
    if show_words:
        print(*(f"  {count:5} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1])), sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main("--words" in sys.argv[1:]))
