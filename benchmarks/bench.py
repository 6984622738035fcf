"""Every benchmark beside its peers in one run: a table, a JSON document, curves, and docs/performance.md.

    tox -e bench                            # everything: about half an hour on two cores, `--quick` a quarter
    tox -e bench -- --quick --only setup    # small sizes, some parts
    tox -e bench -- --page                  # also write docs/performance.md and its pictures

Run it on an idle machine. Contenders and peers take turns, so that other work slows both; where it decides, the table says
"the spread is too wide" in place of a ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checkpoint
import pool
import setup
import step
from figures import Comparison, exponent
from rich.console import Console
from rich.table import Table

PARTS: dict[str, Callable[..., Iterator[Comparison]]] = {
    "setup": setup.comparisons,
    "step": step.comparisons,
    "checkpoint": checkpoint.comparisons,
    "pool": pool.comparisons,
}
ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURES = ROOT / "docs" / "performance.md", ROOT / "docs" / "pictures"
HEAD = """# Performance, compared with torch

Made by `tox -e bench -- --page`: contenders and peers take turns in one run, on a machine that does nothing else. A
ratio is the median over turns, with the interval that holds the true median in nine runs of ten; below 1 the
contender is faster. "At most" is the project's promise: reached if the whole interval is below, missed if it is above,
open otherwise. Times do not carry over to another machine; ratios do to some extent.

"""


def environment() -> dict[str, str]:
    """Return where and with what the run was made."""
    import torch

    model = next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{model or platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def earlier(path: Path) -> tuple[dict[str, str], list[Comparison]]:
    """Return the facts and the comparisons of a run that was written with --json."""
    facts = json.loads(path.read_text(encoding="utf-8"))
    made = [Comparison(**{**fields, "peers": tuple(fields["peers"])}) for fields in facts.pop("comparisons")]
    return facts, made


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def table_of(comparison: Comparison) -> Table:
    """Return one comparison as a table for the terminal."""
    table = Table(title=comparison.name, title_justify="left", box=None, pad_edge=False)
    for column in ("", f"minimum, {comparison.unit}", "median", "spread", "ratio"):
        table.add_column(column, justify="left" if column in ("", "ratio") else "right")
    for row in comparison.rows():
        table.add_row(row.name, f"{row.minimum:.4g}", f"{row.median:.4g}", f"{row.spread:.0%}", row.ratio_text())
    return table


def page_of(facts: dict[str, str], made: Sequence[Comparison]) -> str:
    """Return the page, with curves by their exponents."""
    text = HEAD + "\n".join(f"- {name}: {fact}" for name, fact in facts.items()) + "\n"
    text += "\n## What is promised\n\n| | | ratio |\n| --- | --- | --- |\n"
    promised = [(made_of, row) for made_of in made for row in made_of.rows() if row.goal is not None]
    text += "".join(f"| {made_of.name} | {row.name} | {row.ratio_text()} |\n" for made_of, row in promised)
    for curve in curves(made):
        text += f"\n## {curve.capitalize()}\n\n![{curve}](pictures/{_file(curve)})\n\n"
        text += "Cost grows with the size to the power of: "
        text += ", ".join(f"{name} {power:.2f}" for name, power in exponents(made, curve).items()) + ".\n"
    return text


def curves(made: Iterable[Comparison]) -> list[str]:
    """Return the names of curves that have at least two sizes."""
    sizes: dict[str, set[float]] = {}
    for comparison in made:
        if comparison.curve:
            sizes.setdefault(comparison.curve, set()).add(comparison.size)
    return [curve for curve, at in sizes.items() if len(at) > 1]


def points(made: Iterable[Comparison], curve: str) -> dict[str, list[tuple[float, float]]]:
    """Return (size, median) by name, by size."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for comparison in sorted((c for c in made if c.curve == curve), key=lambda c: c.size):
        for row in comparison.rows():
            rows.setdefault(row.name, []).append((comparison.size, row.median))
    return rows


def exponents(made: Iterable[Comparison], curve: str) -> dict[str, float]:
    """Return the exponent of each name's curve."""
    return {name: exponent(at) for name, at in points(made, curve).items()}


def draw(made: Sequence[Comparison], folder: Path) -> None:
    """Draw each curve, both axes logarithmic: a straight line is a power law."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "fsdp", "svg.fonttype": "none"}  # the same figures give the same small file
    from matplotlib import pyplot as plt

    for curve in curves(made):
        figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
        for name, at in points(made, curve).items():
            axes.plot(*zip(*at, strict=True), marker="o", label=f"{name}: size^{exponent(at):.2f}")
        axes.set(xscale="log", yscale="log", title=curve, xlabel="size", ylabel="ms")
        axes.grid(visible=True, alpha=0.2)
        axes.legend()
        figure.savefig(folder / _file(curve), metadata={"Date": None})
        plt.close(figure)


def _file(curve: str) -> str:
    return "-".join(curve.replace(",", "").split()) + ".svg"


def main() -> None:
    """Measure, print as soon as there is something to print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, few turns")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples here")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.relative_to(ROOT)} and its pictures")
    parser.add_argument(
        "--again", type=Path, metavar="FILE", help="measure nothing: take the samples of an earlier --json"
    )
    options = parser.parse_args()
    console = Console(width=max(100, Console().width))
    if options.again is not None:
        facts, made = earlier(options.again)
    else:
        facts = {**environment(), "sizes": "small (--quick)" if options.quick else "all"}
        console.print("; ".join(facts.values()), soft_wrap=True)
        made = []
        for part in options.only:
            console.print(f"\n{part} ...")
            for comparison in PARTS[part](quick=options.quick):
                made.append(comparison)
                console.print(table_of(comparison))
    for curve in curves(made):
        console.print(f"{curve}: grows with size to the power of {exponents(made, curve)}", soft_wrap=True)
    document: dict[str, Any] = {**facts, "comparisons": [asdict(comparison) for comparison in made]}
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {options.json}")
    if options.page:
        draw(made, PICTURES)
        PAGE.write_text(page_of(facts, made), encoding="utf-8")
        console.print(f"written: {PAGE}")


if __name__ == "__main__":
    sys.exit(main())
