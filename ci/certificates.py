"""Writes docs/certificates: what `fsdp-verify certify` found in the cube of small cases, a page for each implementation.

    fsdp-verify certify torch-fsdp2 --sample 1500 --json torch-fsdp2.json
    python ci/certificates.py torch-fsdp2.json...   # keep what matters of these results, and write their pages
    python ci/certificates.py                       # write the pages of what is kept

What is kept is counts and causes, in a JSON document beside each page; no cell and no word of a page is written by hand,
but for `PAGES`, which names the page of docs/findings that explains a cause.
"""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsdp_testing.cases.records import Case
from fsdp_testing.report.drawings.squares import cube_picture
from fsdp_testing.search.certificate.axes import WORLDS
from fsdp_testing.search.certificate.causes import schedule_of
from fsdp_testing.search.certificate.summary import FACES, VERDICTS

PASS, FAIL, UNKNOWN = VERDICTS
ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "certificates"
FINDINGS = ROOT / "docs" / "findings"
NAMES = ("torch-ddp", "torch-fsdp1", "torch-fsdp1-flat", "torch-fsdp2", "fsdp_ref-wrapper", "fsdp_ref-composable")
ALL_WORLDS = [f"{strategy} {mesh}" for strategy, meshes in WORLDS.items() for mesh in meshes]

_LOW = "bfloat16, reduced in float32"
_SKIPPED = "root and two nested/plain/Ns/Ns/-1/to none/float64"
_SKIPPED_LOW = f"full_shard/1/root and two nested/plain/Ns/Ns/-1/to none/{_LOW}"
_TWO_NAMES = "fsdp1-no-shard-shared-low-precision"
_NOT_SYNCHRONISED = "fsdp2-no-sync-then-unused-in-mixed-precision"

PAGES: dict[str, dict[str, str]] = {
    "torch-fsdp1": {
        "hybrid-group-of-one": "fsdp1-hybrid-group-of-one",
        "local-sums-in-low-precision": "fsdp1-local-sums-in-low-precision",
        f"full_shard/1/root/under two names/NS/S/-1/to none/{_LOW}": _TWO_NAMES,
        f"full_shard/1/root/shared weight/NS/S/-1/to none/{_LOW}": _TWO_NAMES,
        f"hybrid_shard/2x1/root and two nested/under two names/NNS/NNS/-1/not at all/{_LOW}": _TWO_NAMES,
        f"no_shard/2/{_SKIPPED}": "fsdp1-no-sync-then-unused",
        f"full_shard/2/{_SKIPPED}": "fsdp1-no-sync-then-unused",
    },
    "torch-fsdp1-flat": {
        "hybrid-group-of-one": "fsdp1-hybrid-group-of-one",
        "local-sums-in-low-precision": "fsdp1-local-sums-in-low-precision",
        "local-then-unused": "fsdp1-no-sync-then-unused",
        "whole-local-then-unused": "fsdp1-no-sync-then-unused",
        "reduced-local-then-unused": "fsdp1-no-sync-then-unused",
        _SKIPPED_LOW: "fsdp1-no-sync-then-unused",
    },
    "torch-fsdp2": {
        "local-then-unused-part": _NOT_SYNCHRONISED,
        "local-then-unused-unit": _NOT_SYNCHRONISED,
    },
}
"""Implementation -> name of a known failure, or simplest cell of a cause -> page of docs/findings that explains it."""

STYLE = """<style>
svg { --text: #16191f; --soft: #565d6b; --line: #d5d9e0; --pass: #14691f; --fail: #b3101b; --unknown: #8a1f8f; }
@media (prefers-color-scheme: dark) {
svg { --text: #e7eaf0; --soft: #a3abba; --line: #353c48; --pass: #85d893; --fail: #ff9a9f; --unknown: #ea9cf0; } }
text { font: 11px system-ui, sans-serif; fill: var(--text); }
.soft { fill: var(--soft); }
.strong { font-weight: 600; }
.grid { stroke: var(--line); }
.holds { fill: var(--pass); }
.fails { fill: var(--fail); }
.unknown { fill: var(--unknown); }
.some { fill-opacity: 0.55; stroke: var(--text); }
</style>"""

Kept = dict[str, Any]
"""What is kept of one certificate: plain data, as `kept_of` makes it."""


def kept_of(found: dict[str, Any], day: str) -> Kept:
    """Return what is kept of a result of `certify --json`."""
    counted = {
        world: {face: [faces[face].get(verdict, 0) for verdict in VERDICTS] for face in FACES if face in faces}
        for world, faces in found["faces"].items()
    }
    same = ("implementation", "cube", "asked", "verdicts", "reasons", "unexplained")
    return {
        **{name: found[name] for name in same},
        "day": day,
        "torch": found["environment"]["torch"].partition("+")[0],
        "models_watched": True,
        "claimed": found["cube"] - sum(found["not_claimed"].values()),
        "not_claimed": found["not_claimed"],
        "causes": [_cause(one) for one in found["causes"]],
        "faces": counted,
    }


def _cause(one: dict[str, Any]) -> dict[str, Any]:
    case = Case.from_json({"format": "fsdp_testing/case", "version": 1, **one["case"]})
    cell = "/".join(str(value) for value in one["cell"].values())
    where = {"world": f"{case.strategy} {one['cell']['mesh']}", "units": ["", *case.wrapping.units]}
    plain = {name: one[name] for name in ("cells", "signature", "reason", "known", "shortened")}
    return {**plain, "cell": cell, **where, "schedule": schedule_of(case)}


def write(kept: Kept) -> None:
    """Write the JSON document of one implementation, one line for each cause and world."""
    rows = {name: kept[name] for name in kept if name not in ("causes", "faces")}
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in rows.items())
    causes = ",\n".join(f" {json.dumps(one)}" for one in kept["causes"])
    faces = ",\n".join(
        f" {json.dumps(world)}: {json.dumps(counts, separators=(',', ':'))}" for world, counts in kept["faces"].items()
    )
    (FOLDER / f"{kept['implementation']}.json").write_text(
        f'{{\n{text},\n"causes": [\n{causes}\n],\n"faces": {{\n{faces}\n}}\n}}\n', encoding="utf-8"
    )


def read() -> dict[str, Kept]:
    """Return what is kept of every implementation."""
    files = [FOLDER / f"{name}.json" for name in NAMES]
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()}


def pages(table: dict[str, Kept]) -> dict[str, str]:
    """Return the text of every page and picture, by file name."""
    found = {"README.md": index(table)}
    for name, kept in table.items():
        found |= {f"{name}.md": page(kept), f"{name}.svg": picture(kept)}
    return found


def picture(kept: Kept) -> str:
    """Return the cube as a file that shows by itself what the HTML report shows inside a page.

    Patterns of the first step that hold in every world are left out, and texts for a pointer, which pictures do not show.
    """
    faces = {
        world: {face: {s: n for s, n in zip(VERDICTS, counts) if n} for face, counts in by_face.items()}
        for world, by_face in kept["faces"].items()
    }
    found = {face: [by_face[face] for by_face in faces.values() if face in by_face] for face in FACES}
    rows = [f for f in FACES if found[f] and not (f.startswith("first: ") and all(set(c) <= {PASS} for c in found[f]))]
    drawn = str(cube_picture(faces, rows, [world for world in ALL_WORLDS if world in faces]))
    drawn = re.sub(r"><title>[^<]*</title></rect>", "/>", drawn)
    opening, _, rest = drawn.partition(">")
    return f"{opening.replace('<svg', '<svg xmlns=' + chr(34) + 'http://www.w3.org/2000/svg' + chr(34), 1)}>{STYLE}{rest}\n"


def index(table: dict[str, Kept]) -> str:
    """Return the table of all implementations."""
    lines = [
        "# Certificates of small cases",
        "",
        "Made by `python ci/certificates.py` from the results of [`fsdp-verify certify`](../certificate.md).",
        "A sample is spread over all faces of the cube. A failing cell refutes the claim, but a sample without failures",
        "certifies nothing.",
        "",
        "| implementation | cells that ran | hold | fail | unknown | causes | torch | day |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, kept in table.items():
        counts = [f"{kept['verdicts'][status]:,}" for status in (PASS, FAIL, UNKNOWN)]
        ran = f"{_ran(kept):,} of {kept['claimed']:,} that it claims" + (" (a sample)" if _is_sample(kept) else "")
        causes = f"{len(kept['causes'])}" + (
            f" ({kept['unexplained']:,} cells not followed)" if kept["unexplained"] else ""
        )
        row = [f"[{name}]({name}.md)", ran, *counts, causes, kept["torch"], kept["day"]]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, ""])


def page(kept: Kept) -> str:
    """Return the page of one implementation."""
    name, verdicts, sample = kept["implementation"], kept["verdicts"], _is_sample(kept)
    said = {FAIL: "fail", UNKNOWN: "are unknown"}
    others = "".join(f"; {verdicts[status]:,} {verb}" for status, verb in said.items() if verdicts[status])
    lines = [
        f"# {name} in small cases",
        "",
        f"**{verdicts[PASS]:,} of {_ran(kept):,} cells hold{others}.** "
        + (
            f"A sample: the cube has {kept['claimed']:,} cells that {name} claims."
            if sample
            else "These are all cells that it claims."
        ),
        f"Seen on torch {kept['torch']}, CPU, gloo, {kept['day']}"
        + ("" if kept.get("models_watched") else "; this run did not check whether models stay in memory")
        + ". [The cube](../certificate.md#the-cube) explains the axes.",
        "",
        f"![Which cells hold and which fail]({name}.svg)",
        "",
        "Green: all cells of a square hold; red: all fail; pale with an edge: some do; violet: unknown; blank: none ran.",
        "Letters of a first step: S synchronises, N stays local, a small letter leaves a part unused; patterns without",
        "a row hold everywhere.",
    ]
    if kept["causes"]:
        lines += ["", "## Causes of failures"]
    for cause in kept["causes"]:
        lines += ["", *_told(name, cause)]
    if kept["unexplained"]:
        lines += ["", f"{kept['unexplained']:,} failing cells were not explained."]
    lines += ["", "## By axis", "", "| | cells that ran | hold | fail |", "|---|---|---|---|"]
    lines += [f"| {where} | {sum(c):,} | {c[0]:,} | {c[1]:,} |" for where, c in _by_axis(kept)]
    if kept["reasons"]:
        lines += ["", "## Unknown", "", *(f"- {n:,} x {why}" for why, n in kept["reasons"].items())]
    if kept["not_claimed"]:
        missing = kept["not_claimed"].items()
        lines += ["", "## Not claimed", "", *(f"- {n:,} cells of the cube need {tags}" for tags, n in missing)]
    return "\n".join([*lines, ""])


def _told(name: str, cause: dict[str, Any]) -> list[str]:
    stem = page_of(name, cause)
    link = f" [Description and script]({_link(stem)})." if stem else ""
    shortest = "the shortest case" if cause["shortened"] else "not shortened"
    units = ", ".join(unit or "the root" for unit in cause["units"])
    return [
        f"### {cause['cells']:,} cells: {' '.join(cause['signature'].split())}",
        "",
        f"{cause['reason'].splitlines()[0]}.{link}",
        "",
        f"- The simplest cell: `{cause['cell']}`",
        f"- Its schedule ({shortest}; {cause['world']}, units: {units}):",
        *(f"  - `{line}`" for line in cause["schedule"]),
    ]


def page_of(name: str, cause: dict[str, Any]) -> str:
    """Return the page of docs/findings that explains a cause; empty where `PAGES` names none."""
    named = PAGES.get(name, {})
    return named.get(cause["known"]) or named.get(cause["cell"], "")


def _link(stem: str) -> str:
    return f"../findings/{stem}.md"


def _by_axis(kept: Kept) -> list[tuple[str, list[int]]]:
    """Return the counts of every world, and of every other face over all worlds."""
    every = kept["faces"].values()
    rows = [(world, kept["faces"][world]["all"]) for world in ALL_WORLDS if world in kept["faces"]]
    for face in FACES[1:]:
        found = [faces[face] for faces in every if face in faces]
        rows += [(face, [sum(counts) for counts in zip(*found)])] if found else []
    return rows


def _ran(kept: Kept) -> int:
    return sum(kept["verdicts"].values())


def _is_sample(kept: Kept) -> bool:
    return _ran(kept) < kept["claimed"]


def main(results: list[str]) -> None:
    """Keep results, and write all pages."""
    FOLDER.mkdir(exist_ok=True)
    for result in map(Path, results):
        day = datetime.fromtimestamp(result.stat().st_mtime, UTC).date().isoformat()
        write(kept_of(json.loads(result.read_text(encoding="utf-8")), day))
    for name, text in pages(read()).items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
