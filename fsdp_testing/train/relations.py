"""Checks changes that must not change results: arguments, micro-batches, order of rows, more padding, another version.

Each is one more run of the script on as many ranks, compared with the existing run by the same comparison and the same
bounds: only sums of the same numbers in another order are forgiven.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_testing.cases.records import Verdict
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.train import evidence
from fsdp_testing.train.batches import near, tensors_in
from fsdp_testing.train.by_batches import same_moments
from fsdp_testing.train.check import (
    check_disagreements,
    check_numbers,
    guarded,
    not_compared,
    not_stepped,
)
from fsdp_testing.train.collators import Uncollated
from fsdp_testing.train.comparison import CLEAR_ROUNDINGS, Difference
from fsdp_testing.train.conventions import rows_of
from fsdp_testing.train.deciding import decide
from fsdp_testing.train.feed import FedLoader, Feed, Source, feeds_of
from fsdp_testing.train.loaders import of_training
from fsdp_testing.train.on_rank import RunSettings
from fsdp_testing.train.pair import Pair, Varied, computes_the_same, other_start
from fsdp_testing.train.parts import with_parts_in_place
from fsdp_testing.train.quantities import Kind, rank_count
from fsdp_testing.train.report import Judgement
from fsdp_testing.train.running import Failed, Runner, Undecided
from fsdp_testing.train.terms_of_worlds import wrong_term
from fsdp_testing.train.whole import WholeRun, initial

ORDER, PADDING = "order", "padding"
_FIELD = re.compile(r"\{([^{}]*)\}")
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
}


@dataclass(frozen=True, slots=True)
class Variable:
    """What is varied of a script's arguments; the first value is that of all other runs.

    Attributes:
        name: Stands in braces in the arguments; empty where the values are arguments that are added at the end.
        values: Each in words as it was given.
    """

    name: str
    values: tuple[str, ...]

    def label(self, value: str) -> str:
        """Return how a run with this value is called."""
        return f"{self.name}={value}" if self.name else value or "no further arguments"


@dataclass(frozen=True, slots=True)
class Variation:
    """One relation of arguments: those that must change nothing.

    Attributes:
        name: For the table.
        names: How the run as it is and the varied one are called.
        arguments: Arguments of the varied one.
    """

    name: str
    names: tuple[str, str]
    arguments: tuple[str, ...]


def read(
    vary: Sequence[Sequence[str]], arguments: Sequence[str]
) -> tuple[tuple[str, ...], list[Variation], tuple[str, ...]]:
    """Return the arguments of all other runs, the variations of them, and the names of relations of rows.

    Args:
        vary: For each `--vary` its one word (`order`, `padding`, `NAME=VALUE,VALUE`) or its two texts of arguments.
        arguments: Arguments of the script, in which `{NAME}` stands for a value, and `{8/NAME}` is computed.

    Raises:
        InvalidArgument: The words are of no such form.
    """
    variables: dict[str, Variable] = {}
    rows: dict[str, None] = {}
    for words in vary:
        name, equals, values = words[0].partition("=")
        if len(words) == 1 and words[0] in (ORDER, PADDING):
            rows[words[0]] = None
        elif len(words) == 1 and equals and name.isidentifier():
            variables[name] = _variable(name, values, arguments)
        elif len(words) >= 2:
            before = variables.get(f" {words[0]}", Variable("", (words[0],)))
            variables[f" {words[0]}"] = replace(before, values=(*before.values, *words[1:]))
        else:
            raise InvalidArgument(
                f'vary: expected {ORDER}, {PADDING}, NAME=VALUE,VALUE or two texts of arguments ("" "--compile"), got '
                f"{words[0]!r}. Texts of arguments begin with a dash, or are empty."
            )
    first = {key: variable.values[0] for key, variable in variables.items()}
    variations = [
        Variation(
            f"--vary {variable.label(value)}" if variable.name else f'--vary "{variable.values[0]}" "{value}"',
            (variable.label(variable.values[0]), variable.label(value)),
            _with_values(arguments, variables, first | {key: value}),
        )
        for key, variable in variables.items()
        for value in variable.values[1:]
    ]
    return _with_values(arguments, variables, first), variations, tuple(rows)


def _variable(name: str, values: str, arguments: Sequence[str]) -> Variable:
    given = tuple(values.split(","))
    if len(given) < 2 or not all(given):
        raise InvalidArgument(f"vary: expected two values or more, got {name}={values}. Write --vary {name}=1,2,4.")
    if not any(name in _names(field) for word in arguments for field in _FIELD.findall(word)):
        raise InvalidArgument(
            f"vary: expected {{{name}}} in the arguments of the script, got {shlex.join(arguments) or 'none'}. Write where "
            f"it goes: SCRIPT --accumulate {{{name}}} --batch {{8/{name}}}."
        )
    return Variable(name, given)


def _names(field: str) -> set[str]:
    return {*re.findall(r"[A-Za-z_]\w*", field)}


def _with_values(
    arguments: Sequence[str], variables: Mapping[str, Variable], values: Mapping[str, str]
) -> tuple[str, ...]:
    named = {variable.name: values[key] for key, variable in variables.items() if variable.name}
    added = [word for key, variable in variables.items() if not variable.name for word in shlex.split(values[key])]

    def fill(field: re.Match[str]) -> str:
        inside = field[1]
        if inside in named:
            return named[inside]
        return str(_computed(inside, named)) if _names(inside) & {*named} else field[0]

    return (*(_FIELD.sub(fill, word) for word in arguments), *added)


def _computed(text: str, values: Mapping[str, str]) -> int:
    """Return the whole number that a text such as "8/k" gives.

    Raises:
        InvalidArgument: It gives no whole number.
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and node.id in values:
            return int(values[node.id])
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv)):
            quotient, rest = divmod(value(node.left), value(node.right))
            if rest:
                raise ValueError("is not a whole number")
            return quotient
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("may contain only whole numbers, names, + - * and /")

    try:
        return value(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError) as why:
        given = ", ".join(f"{name}={number}" for name, number in values.items())
        raise InvalidArgument(
            f"vary: expected whole numbers, got {{{text}}} with {given}: {why}. Choose values that divide it."
        ) from why


def judge_varied(
    runner: Runner, runs: Mapping[int, WholeRun], size: int, other: Runner, relation: tuple[str, tuple[str, str]]
) -> Judgement:
    """Judge a script that was started differently on as many ranks.

    Args:
        runner: Runs it as it is.
        runs: Those runs, by number of ranks; there is one of one process.
        size: Number of ranks.
        other: Runs it in the other way.
        relation: Its name, and how both runs are called.
    """
    name, names = relation

    def judge() -> Judgement:
        if size not in runs:
            raise Undecided(f"there is nothing to compare with: see {rank_count([size])}.")
        base, varied = runs[size], Varied(other, names, _cause)
        run = with_parts_in_place(runs[1], other.run(size))
        check_numbers(other, run)
        pair = Pair(runner, base, run, varied=varied)
        how = _check_start(pair)
        check_disagreements(pair)
        compared = decide(pair)
        lines = (*compared.lines, *not_stepped(run), *not_compared(run, ()))
        sentence = f"{run.steps} steps match those of {names[0]}{how}"
        return Judgement(size, Verdict.PASS, sentence, lines, compared.unknown, steps=run.steps)

    return replace(guarded(other, size, judge), relation=name)


def _check_start(pair: Pair) -> str:
    """Refuse runs with other initial weights or rows, and return a note if only forward's arguments differ.

    Raises:
        Failed: The rows differ, though not their number.
        Undecided: The initial weights or the sizes of batches differ.
    """
    base, run = pair.reference, pair.run
    shapes = [{key: value[0].shape for key, value in initial(world).items()} for world in (base, run)]
    odd = [key for key in {**shapes[0], **shapes[1]} if shapes[0].get(key) != shapes[1].get(key)]
    if odd:
        raise Undecided(f"has other parameters than {pair.other}, first {odd[0]}: it is another model.")
    begun = other_start(pair)
    if begun is not None:
        raise Undecided(
            f"begins with different weights than {pair.other}: {begun}. Draw them from one seed before anything is "
            "sharded or compiled, or load the same checkpoint."
        )
    for step in range(min(base.steps, run.steps)):
        due, given = base.union(step), run.union(step)
        if near(due, given):
            continue
        if _takes_the_same(base, run, as_many=due.total() == given.total()) or computes_the_same(pair):
            return ", with other arguments of forward"
        if due.total() != given.total():
            raise Undecided(
                f"takes {given.total()} rows at step {step} where {pair.other} takes {due.total()}. Keep the total "
                "batch of a step: --vary k=1,2 SCRIPT --accumulate {k} --batch {8/k}, with the names of your script."
            )
        raise Failed(
            f"takes different rows than {pair.other} at step {step}, though equally many. Cause: the order of the "
            "data, or the random numbers drawn for it, depends on what is varied. Draw it from a separate generator.",
            pair.table,
        )
    return ""


def _takes_the_same(base: WholeRun, run: WholeRun, *, as_many: bool) -> bool:
    """Whether the ranks of both take the same rows in the same order, by index at each step, or by digest.

    Rows that are padded have other digests, and of rows that are packed into one there are fewer.
    """
    steps = min(base.steps, run.steps)
    for one, two in zip(base.ranks, run.ranks):
        known = min(len(one.taken.rows), len(two.taken.rows))
        by_digest = as_many and known and one.taken.rows[:known] == two.taken.rows[:known]
        indices = one.taken.indices(steps)
        if not by_digest and (not indices or indices != two.taken.indices(steps)):
            return False
    return True


def _cause(base: WholeRun, run: WholeRun, difference: Difference) -> str:
    """Return why two runs on as many ranks differ."""
    kind, step = difference.quantity.kind, difference.step
    if kind in (Kind.RATE, Kind.SETTING):
        what = "learning rate" if kind is Kind.RATE else f"optimizer's {difference.quantity.name}"
        return f"Cause: the {what} depends on what is varied."
    if kind is Kind.COPY:
        return "Cause: how often this copy of the weights is updated, or by what, depends on what is varied."
    passes = (
        [sum(len(rank.steps[step].losses) for rank in world.ranks) for world in (base, run)] if step < run.steps else []
    )
    norms = any(rank.steps[step].batch_norm for rank in run.ranks) if step < run.steps else False
    if norms and passes[0] != passes[1]:
        return (
            "Cause: BatchNorm normalises the rows of each micro-batch alone, by design: k micro-batches are not one batch. Use "
            "another normalisation, or vary a model without it."
        )
    return (
        evidence.between_sizes(base.evidence, run.evidence, 1)
        or wrong_term(base, run, CLEAR_ROUNDINGS)
        or _fewer_numbers(difference)
    )


def _fewer_numbers(difference: Difference) -> str:
    if difference.ratio is not None and difference.numbers > 1:
        return f"Every element is {difference.ratio:.6g} times as large."
    before = f"Step {difference.step - 1} still agrees. " if difference.steps > 1 and difference.step else ""
    return f"{before}Look at what is varied, and at what it does first at step {difference.step}."


def judge_rows(runner: Runner, alone: WholeRun, relation: str) -> Judgement:
    """Judge one process with its rows in another order within each batch, or padded further.

    Args:
        runner: Runs it.
        alone: The run of one process.
        relation: `order` or `padding`.
    """

    def judge() -> Judgement:
        known = runner.run(1, RunSettings(keep_data=True))
        change = _reversed if relation == ORDER else _padded
        how = "the rows of each batch in reverse" if relation == ORDER else "each batch padded to the widest"
        varied = Varied(runner, ("its rows unchanged", how), _cause)
        for feed in change(known, feeds_of([known.ranks[0].taken], known.forwards(), known.forwards())):
            run = runner.run(1, RunSettings(feed=feed))
            check_numbers(runner, run)
            if not _changed(relation, known, run):
                continue
            compared = decide(Pair(runner, alone, run, own=feed, varied=varied))
            sentence = f"{run.steps} steps with {how} match those with its rows unchanged"
            return Judgement(1, Verdict.PASS, sentence, compared.lines, compared.unknown, steps=run.steps)
        raise Undecided(
            "the rows of its batches cannot be put in another order: mark the line where it takes one, `x, y = "
            "fsdp_testing.batch(x, y)`, and take more than one row."
            if relation == ORDER
            else "nothing can be padded further: that needs a DataLoader whose collate_fn pads rows of different lengths to "
            "the longest of a batch, in the same way each time."
        )

    return replace(guarded(runner, 1, judge), relation=f"--vary {relation}")


def _changed(relation: str, known: WholeRun, run: WholeRun) -> bool:
    """Whether a run took the same rows in other places, or as many that are padded further."""
    if relation == PADDING:
        return same_moments(run, known) and known.rows != run.rows
    same = all(near(known.union(step), run.union(step)) for step in range(min(known.steps, run.steps)))
    return same and known.rows != run.rows


def _reversed(_: WholeRun, feeds: Iterator[Feed]) -> Iterator[Feed]:
    for feed in feeds:
        loaders = [
            FedLoader(one.length, one.passes and [[_reverse(item) for item in items] for items in one.passes])
            for one in feed.loaders
        ]
        yield replace(feed, loaders=loaders, batches=[_reverse(batch) for batch in feed.batches])


def _reverse(item: Any) -> Any:
    """Return an item of a loader with its rows in reverse: tensors that are as long as the first are rows."""
    if isinstance(item, Uncollated):
        return replace(item, item=_reverse(item.item))
    tensors = [tensor for tensor in tensors_in(item) if tensor.ndim]
    count = len(tensors[0]) if tensors else 0
    return rows_of(item, range(count - 1, -1, -1), count) if count > 1 else item


def _padded(known: WholeRun, _: Iterator[Feed]) -> Iterator[Feed]:
    """Yield the rows of each batch beside those of the widest batch, which are taken away again when they are padded."""
    loaders = known.ranks[0].taken.loaders
    trains = of_training(loaders)
    passes = [one for loader, of_it in zip(loaders, trains) for one in loader.passes if of_it and not loader.draws]
    items = [(item, samples) for one in passes for item, samples in zip(one.items, one.samples)]
    if not items:
        return
    widest = max(
        items, key=lambda one: max((t[0].numel() for t in tensors_in(one[0]) if t.ndim and len(t)), default=0)
    )[1]

    def beside(samples: list[Any]) -> Uncollated:
        return Uncollated([*samples, *widest], (len(samples), len(widest)))

    fed = [
        FedLoader(loader.length, [[beside(samples) for samples in one.samples] for one in loader.passes])
        if of_it
        else FedLoader()
        for loader, of_it in zip(loaders, trains)
    ]
    yield Feed(Source.LOADER, fed, pads=True, rank=0)
