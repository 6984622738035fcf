"""The verdict on a training, for people and machines: every verdict lists what was compared. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_testing.base.document import Format
from fsdp_testing.cases.records import Verdict
from fsdp_testing.cases.records.verdict import exit_code, merge
from fsdp_testing.errors import HarnessError
from fsdp_testing.report.sheet import (
    Article,
    Block,
    Cell,
    Fold,
    Listing,
    Row,
    RowGroup,
    Section,
    Sheet,
    Table,
    bulleted,
)
from fsdp_testing.train.comparison import Difference
from fsdp_testing.train.quantities import Kind, Quantity, rank_count
from fsdp_testing.train.whole import WholeRun

FORMAT = Format("fsdp_testing/script", 1)
WORDS = {Verdict.PASS: "pass", Verdict.FAIL: "FAIL", Verdict.UNKNOWN: "unknown"}
KINDS = {
    Kind.UNCLIPPED: "gradients before clipping",
    Kind.GRADIENT: "gradients as the optimizer receives them",
    Kind.PARAMETER: "parameters after the step",
    Kind.COPIED: "the model's own parameters, which the optimizer steps as copies, before the next forward",
    Kind.MOMENT: "the optimizer's state",
    Kind.BUFFER: "buffers",
}


class TrainingDiffers(AssertionError):
    """A training gives different results on different worlds; the message names the first quantity and step."""


class TrainingUndecided(HarnessError):
    """No verdict on a training with some number of ranks; the message says why, and what to change."""


class TrainingPartlyUndecided(UserWarning):
    """Worlds agree, and some numbers have no verdict, because roundings alone move them that far."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on one world size.

    Attributes:
        size: Number of ranks.
        verdict: pass, fail or unknown.
        sentence: Why; for a pass, what it was compared with.
        compared: The quantities that were compared, and those that were not.
        unknown: What could not be judged, though the rest was.
        table: Table of failures: loss and norm of both worlds, step by step; for races, both places of each.
        output: End of the script's own output, if it did not end well.
        relation: The change that must change nothing; empty for the number of ranks.
        steps: Steps that were compared.
        first: The first difference, if it is a number.
    """

    size: int
    verdict: Verdict
    sentence: str
    compared: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    table: tuple[str, ...] = ()
    output: tuple[str, ...] = ()
    relation: str = ""
    steps: int = 0
    first: Difference | None = None

    @property
    def owner(self) -> str:
        return f"{self.relation} on {rank_count([self.size])}" if self.relation else rank_count([self.size])

    @property
    def title(self) -> str:
        """The subject of the verdict, and the verdict."""
        return f"{self.owner}: {WORDS[self.verdict]}"

    def row(self, steps: int) -> Row:
        """Return for each step whether it agrees (=), differs first (x) or was not compared (-), and what differs first."""
        until = self.first.step if self.first else self.steps
        marks = ["="] * until + ["x"] * bool(self.first) + ["-"] * steps
        first = str(self.first.quantity) if self.first else ""
        cells = [*marks[:steps], WORDS[self.verdict], first]
        label = self.owner if self.relation else f"{self.owner} and one process"
        return Row(label, tuple(Cell(text, "fail" if text == "x" else "") for text in cells))

    def lines(self) -> list[str]:
        return [
            f"{self.title}: {self.sentence}",
            *(f"  {line}" for line in (*self.compared, *self.unknown, *self.table, *self.output)),
        ]


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The verdict on a training.

    Attributes:
        script: As given by the user.
        judgements: One for each world size; for one process only if it has no verdict.
    """

    script: str
    judgements: tuple[Judgement, ...] = field(default=())

    @property
    def verdict(self) -> Verdict:
        """A failure wins over unknown, and unknown over pass; nothing judged is unknown."""
        return merge(judgement.verdict for judgement in self.judgements)

    @property
    def exit_code(self) -> int:
        """0 all worlds pass, 1 one differs, 3 one has no verdict."""
        return exit_code([self.verdict])

    @property
    def conclusion(self) -> str:
        verdicts = [
            f"{WORDS[verdict]} on {rank_count(sizes)}"
            for verdict in WORDS
            if (sizes := [one.size for one in self.judgements if one.verdict is verdict and not one.relation])
        ]
        verdicts += [f"{WORDS[one.verdict]} of {one.owner}" for one in self.judgements if one.relation]
        return f"{self.script}: {'; '.join(verdicts) or 'nothing was judged'}"

    def relations(self) -> Table | None:
        """Return relation by step, and what differs first; nothing where the number of ranks alone was changed."""
        if not any(judgement.relation for judgement in self.judgements):
            return None
        steps = max((max(one.steps, one.first.step + 1 if one.first else 0) for one in self.judgements), default=0)
        columns = (*map(str, range(steps)), "verdict", "differs first")
        rows = RowGroup(tuple(judgement.row(steps) for judgement in self.judgements))
        return Table("relation by step", columns, (rows,), key="= agrees, x differs first, - not compared")

    def to_json(self, **facts: Any) -> str:
        """Return the report as a JSON document, with further `facts` of plain data."""
        body = {"script": self.script, "verdict": self.verdict, "exit_code": self.exit_code, **facts}
        return FORMAT.write({**body, "judgements": self.judgements}, indent=1) + "\n"

    def __str__(self) -> str:
        return "\n".join([self.script, *(line for judgement in self.judgements for line in judgement.lines())])


def training_sheet(
    report: TrainReport,
    *,
    arguments: Sequence[str],
    steps: int,
    seconds: float,
    environment: Mapping[str, str],
    **_: Any,
) -> Sheet:
    """Return the verdict as a sheet."""
    articles = []
    for judgement in report.judgements:
        told = [*judgement.compared, *judgement.unknown]
        blocks: list[Block] = [bulleted(told)] if told else []
        for title, lines in (("in detail", judgement.table), ("last output of the script", judgement.output)):
            blocks += [Fold(title, (Listing("\n".join(lines)),), unfolded=True)] if lines else []
        word, kind = WORDS[judgement.verdict], judgement.verdict.value
        articles.append(Article(word, tuple(blocks), judgement.owner, kind, sentence=judgement.sentence))
    table = report.relations()
    sections = [Section("", (table,))] if table else []
    return Sheet(
        title=report.script,
        exit_code=report.exit_code,
        conclusion=report.conclusion,
        sections=(*sections, Section("", tuple(articles))),
        subject=" ".join([report.script, *arguments]),
        environment={**environment, "duration": f"{seconds:.1f} s", "steps": f"at most {steps}"},
    )


def compared_lines(
    worlds: tuple[WholeRun, WholeRun], names: Sequence[Quantity], left_out: Sequence[str], remarks: Sequence[str]
) -> tuple[str, ...]:
    """Return what was compared at each step of two worlds, and what was not and why."""
    reference, run = worlds
    chosen = set(names)
    order = [key for key in run.quantities if key in chosen]
    listed = [str(key) for key in order if key.kind not in (*KINDS, Kind.SETTING, Kind.COPY, Kind.END)]
    settings = [key.name for key in order if key.kind is Kind.SETTING]
    listed += [f"other settings ({', '.join(settings)})"] if settings else []
    for kind, words in KINDS.items():
        tensors = [max(run.quantities[key], key=torch.Tensor.numel) for key in run.names(kind) if key in chosen]
        if tensors:
            listed.append(f"{words} ({len(tensors)} tensors, {sum(t.numel() for t in tensors):,} numbers)")
    # Ranks that work together on a row take it several times.
    rows = sum(reference.union(step).total() for step in range(reference.steps))
    steps = "1 step" if run.steps == 1 else f"each of {run.steps} steps"
    lines = [f"compared at {steps}: {', '.join(listed)}; {rows} rows of data"]
    copies = sorted({f"{Kind.COPY.value}{key.part!r}" for key in names if key.kind is Kind.COPY})
    lines += [f"compared at the end: {', '.join(copies)}"] if copies else []
    return (*lines, *(f"not compared: {what}" for what in left_out), *remarks)
