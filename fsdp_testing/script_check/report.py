"""How does the verdict on a script read? What was compared is listed with every verdict. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fsdp_testing.records import Verdict
from fsdp_testing.script_check.whole import COPY, WholeRun
from fsdp_testing.training_check.whole import BUFFER, COPIED, GRADIENT, MOMENT, PARAMETER, SETTING, UNCLIPPED

KINDS = {
    UNCLIPPED: "gradients as the first clip is given them",
    GRADIENT: "gradients as the optimizer is given them",
    PARAMETER: "parameters after the step",
    COPIED: "the model's own parameters, which the optimizer steps as copies, before the next forward",
    MOMENT: "the optimizer's state",
    BUFFER: "buffers",
}


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on one world size.

    Attributes:
        size: Number of ranks.
        verdict: pass, fail or unknown.
        sentence: Why; for a pass with what it was compared.
        compared: What was compared, and what was not.
        table: Loss and norm of both worlds, step by step; of failures.
    """

    size: int
    verdict: Verdict
    sentence: str
    compared: tuple[str, ...] = ()
    table: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the lines of a terminal."""
        words = {Verdict.PASS: "pass", Verdict.FAIL: "FAIL", Verdict.UNKNOWN: "unknown"}
        return [
            f"{self.size} ranks: {words[self.verdict]}: {self.sentence}",
            *(f"  {line}" for line in (*self.compared, *self.table)),
        ]


@dataclass(frozen=True, slots=True)
class ScriptReport:
    """The verdict on a script.

    Attributes:
        script: As it was given.
        judgements: Of each world size.
    """

    script: str
    judgements: tuple[Judgement, ...] = field(default=())

    @property
    def verdict(self) -> Verdict:
        """A failure wins over unknown, and unknown over pass; nothing judged is unknown."""
        found = {judgement.verdict for judgement in self.judgements}
        worst = [verdict for verdict in (Verdict.FAIL, Verdict.UNKNOWN) if verdict in found]
        return worst[0] if worst else Verdict.PASS if found else Verdict.UNKNOWN

    def __str__(self) -> str:
        return "\n".join([self.script, *(line for judgement in self.judgements for line in judgement.lines())])


def compared_lines(
    run: WholeRun, names: Sequence[str], left_out: Sequence[str], remarks: Sequence[str]
) -> tuple[str, ...]:
    """Return what was compared at each step, and what was not and why.

    Args:
        run: The world.
        names: Of the quantities that were compared.
        left_out: What was not, and why.
        remarks: More lines.
    """
    order = list(run.quantities)
    found = sorted({name for name in names if not name.startswith((*KINDS, SETTING, COPY))}, key=order.index)
    settings = [name.removeprefix(SETTING) for name in names if name.startswith(SETTING)]
    found += [f"other settings ({', '.join(settings)})"] if settings else []
    for start, words in KINDS.items():
        tensors = [
            max(values, key=torch.Tensor.numel)
            for name, values in run.quantities.items()
            if name.startswith(start) and name in names
        ]
        if tensors:
            found.append(f"{words} ({len(tensors)} tensors, {sum(t.numel() for t in tensors):,} numbers)")
    rows = sum(sum(run.union(step).values()) for step in range(run.steps))
    steps = "1 step" if run.steps == 1 else f"each of {run.steps} steps"
    lines = [f"compared at {steps}: {', '.join(found)}; {rows} rows of data"]
    copies = sorted({name.split(", ")[0] for name in names if name.startswith(COPY)})
    lines += [f"compared at the end: {', '.join(copies)}"] if copies else []
    return (*lines, *(f"not compared: {what}" for what in left_out), *remarks)
