"""Runs that check saved state itself: state that must be refused, the places of shards, what is not finite, directories."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.operations.saving import copied
from fsdp_testing.cases.records import Batch, Case, RankObservation
from fsdp_testing.checks.suites.programs import Remark, RemarkedObservation, review_remarks
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.oracle import rank_jobs
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.ways import refusals_as_errors, shared_directory

State = dict[str, torch.Tensor]


def _lacking(state: State) -> State:
    return dict(list(state.items())[1:])


def _with_another(state: State) -> State:
    return {**state, "layers.9.weight": next(iter(state.values()))}


def _misshapen(state: State) -> State:
    name, tensor = next(iter(state.items()))
    return {**state, name: tensor.new_zeros(tensor.shape[0] + 1, *tensor.shape[1:])}


WRONG_STATES: Mapping[str, Callable[[State], State]] = {
    "state that lacks a parameter": _lacking,
    "state with an unknown parameter": _with_another,
    "state with a parameter of another shape": _misshapen,
}
"""State that must be refused, by the label of the observation after which it is loaded. Each is a case with this name."""


WRONG_IN_SHARDS: Mapping[str, Callable[[State], State]] = {
    "state in shards that lacks a parameter": _lacking,
    "state in shards with an unknown parameter": _with_another,
}
WRONG_RAW: Mapping[str, Callable[[State], State]] = {
    "raw state that lacks a shard": _lacking,
    "raw state with an unknown shard": _with_another,
}
OF_ANOTHER_RANK = {form: f"{form} state that another rank saved" for form in ("sharded", "local")}
OF_ANOTHER_MODEL = {form: f"{form} state of a model with other shapes" for form in ("sharded", "local")}


class RemarkingProgram(RankProgram):
    """A program after which a rank tests further actions, such as saving and loading, and reports faults."""

    @property
    def quantity(self) -> str:
        """Return the subject of its statements."""
        return "state"

    def run(self, *, observe_all: bool = False) -> RankObservation:
        """Run the case, then look; remarks come last. Collectives: those of saving and loading."""
        observation = super().run(observe_all=observe_all)
        if observation.error is not None:
            return observation
        try:
            statements = list(self.statements())
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - whatever a foreign implementation raises is a finding
            return replace(observation, error=self.record(raised))
        remarks = tuple(Remark(len(self.case.program), self.quantity, statement) for statement in statements)
        return observation.extended(RemarkedObservation, remarks=remarks)

    def statements(self) -> Iterator[str]:
        """Yield what is wrong."""
        raise NotImplementedError


class ProgramWithMarks(RemarkingProgram):
    """A program that reports what is wrong at its marked points, each once."""

    label = ""
    """The label of the observations that mark them."""

    def __init__(self, case: Case, adapter: Adapter, rank: int) -> None:
        super().__init__(case, adapter, rank)
        self.remarks: list[str] = []

    def statements(self) -> Iterator[str]:
        """Yield what was wrong at any point."""
        yield from dict.fromkeys(self.remarks)


class SavesItsCopy(ProgramWithMarks):
    """A program that copies its model at its marked points, and compares the copy's whole state."""

    quantity = "state of a deep copy"
    label = "the model is copied, and the copy saved"

    def observe(self, label: str) -> None:
        """Copy after the snapshot. Collectives: those of saving, twice; every rank saves."""
        super().observe(label)
        if label != self.label:
            return
        with self._inside():
            twin = copy.deepcopy(self.model)
            own, copied = (dict(self.adapter.full_state_dict(model)) for model in (self.model, twin))
        self.remarks += [f"lacks {name}" for name in own if name not in copied]
        for name in [name for name in own if name in copied]:
            one, other = own[name], copied[name]
            if one.dtype != other.dtype or not torch.equal(one, other):
                self.remarks.append(
                    f"has {name} in {other.dtype}, or other numbers in it, expected those of the model, {one.dtype}"
                )


class LoadsAndTrains(RemarkingProgram):
    """A program that loads a state, trains on, and looks at the state that it passed."""

    quantity = "state that was loaded"
    form = "full"

    def statements(self) -> Iterator[str]:
        """Yield the names whose values training has changed. Collectives: those of saving, loading and training."""
        save, load = (getattr(self.adapter, f"{verb}{self.form}_state_dict") for verb in ("", "load_"))
        with self._inside():
            state = save(self.model)
        passed, kept = copied(state), copied(state)
        with self._inside():
            load(self.model, passed)
            self.backward(self.call(Batch(11)).loss)
            self.adapter.step(self.model, self.optimizer)
        changed = [
            name for name in kept if not all(map(torch.equal, *(_values(each[name]) for each in (passed, kept))))
        ]
        if changed:
            yield f"is changed by later training: {', '.join(changed)}. Copy what is loaded"


def loads_and_trains(form: str) -> RunMode:
    """Return the mode for a case that loads its state in a form, and looks at that state after another step."""
    return RunMode(rank_jobs.run_as, (LoadsAndTrains, {"form": form}), review=review_remarks)


class LabelledProgram(RemarkingProgram):
    """A program whose last observation names what it tests."""

    @property
    def quantity(self) -> str:
        """Return that name; empty for a shortened case without an observation."""
        return next((label for op in reversed(self.case.program) if (label := getattr(op, "label", ""))), "")


class RefusingProgram(LabelledProgram):
    """Loads its saved state, then the unfitting state that the last observation names."""

    def statements(self) -> Iterator[str]:
        """Yield a fault if it was loaded."""
        form = self._form()
        if form is None:
            return  # a shortened case, which names none
        load: Any = getattr(self.adapter, f"load_{form}_state_dict")
        saved = self._saved(form, self.model)
        load(self.model, dict(saved))  # a loader that refuses this refuses anything
        read = self._wrong(form, saved)
        try:
            load(self.model, read())
        except Exception:  # noqa: BLE001 - whatever it raises, it refuses
            return
        yield f"a {self.quantity} was loaded, expected it to be refused"

    def _form(self) -> str | None:
        wrong = {"full": WRONG_STATES, "sharded": WRONG_IN_SHARDS, "local": WRONG_RAW}
        other = {form: {OF_ANOTHER_MODEL.get(form), OF_ANOTHER_RANK.get(form)} for form in wrong}
        return next((form for form, labels in wrong.items() if self.quantity in {*labels, *other[form]}), None)

    def _saved(self, form: str, model: nn.Module) -> State:
        save: Any = getattr(self.adapter, f"{form}_state_dict")
        with self._inside():
            saved = dict(save(model))
        # A whole state may share its memory with parameters; shards are objects of the implementation's own.
        return {fqn: tensor.detach().clone() for fqn, tensor in saved.items()} if form == "full" else saved

    def _wrong(self, form: str, saved: State) -> Callable[[], State]:
        if self.quantity == OF_ANOTHER_RANK.get(form):
            own, of_next_rank = _files_of_two_ranks(saved)
            load: Any = getattr(self.adapter, f"load_{form}_state_dict")
            load(self.model, own())  # whoever cannot read files refuses nothing
            return of_next_rank
        if self.quantity != OF_ANOTHER_MODEL.get(form):
            return partial({**WRONG_STATES, **WRONG_IN_SHARDS, **WRONG_RAW}[self.quantity], saved)
        other = self._saved(form, self._model_of(replace(self.case, model=replace(self.case.model, name="uneven")), {}))
        return lambda: {name: value for name, value in other.items() if name in saved}


def _files_of_two_ranks(saved: State) -> tuple[Callable[[], State], Callable[[], State]]:
    """Return a reader of the files of this rank and of the next. Collectives: a gather of objects; every rank calls."""
    file = io.BytesIO()
    torch.save(saved, file)
    files: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files, file.getvalue())
    rank = dist.get_rank()
    both = files[rank], files[(rank + 1) % len(files)]
    first, second = (partial(torch.load, io.BytesIO(content), weights_only=False) for content in both)
    return first, second


class NotFinite(RemarkingProgram):
    """Saves parameters in a form after they became NaN and infinite, as in a run that diverged, and loads them."""

    form = ""

    def statements(self) -> Iterator[str]:
        """Yield what is lost."""
        adapter = self.adapter
        save, load = (getattr(adapter, name.format(self.form)) for name in ("{}_state_dict", "load_{}_state_dict"))
        pieces = [piece.value for held in adapter.local_pieces(self.model).values() for piece in held]
        for number, value in enumerate(value for value in pieces if value is not None and value.numel()):
            value.detach().view(-1)[-1:].fill_((math.nan, math.inf, -math.inf)[number % 3])
        with self._inside():
            state = save(self.model)
            before = {fqn: value.detach().clone() for fqn, value in adapter.full_state_dict(self.model).items()}
            adapter.finish(self.model)
            self.rebuild({})
            load(self.model, state)
            after = adapter.full_state_dict(self.model)
        if all(bool(value.isfinite().all()) for value in before.values()):
            yield "the full state is finite, although parameters are not"
        for fqn, value in before.items():
            if not same_values(after[fqn], value):
                yield f"{fqn} differs once it is loaded: elements that are not finite were saved"


def same_values(one: Any, other: Any) -> bool:
    """Whether two saved values are the same, NaN and dtype included."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            one.dtype == other.dtype
            and torch.equal(one.isnan(), other.isnan())
            and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_values(one[key], other[key]) for key in one)
    return type(one) is type(other) and repr(one) == repr(other)


class ShardsPlaced(RemarkingProgram):
    """Compares its saved shards with the full state, each at the place that the shard names."""

    def statements(self) -> Iterator[str]:
        """Yield the parameters whose shards hold other elements."""
        with self._inside():
            whole, parts = self.adapter.full_state_dict(self.model), self.adapter.sharded_state_dict(self.model)
        for fqn, value in whole.items():
            if fqn not in parts:
                yield f"there are no shards of {fqn}"
            elif not all(torch.equal(piece, value[place]) for place, piece in _pieces(parts[fqn])):
                yield f"shards of {fqn} differ from the full state"


def _pieces(part: Any) -> list[tuple[Any, torch.Tensor]]:
    """Return a rank's saved parts of a tensor, each with its place in the whole."""
    if isinstance(part, DTensor):
        return [(..., part.full_tensor())]
    # torch's older ShardedTensor knows the place of each shard; other tensors are whole.
    shards = getattr(part, "local_shards", None)
    return [(..., part)] if shards is None else [(_place(shard.metadata), shard.tensor) for shard in shards()]


def _values(part: Any) -> list[torch.Tensor]:
    return [piece for _, piece in _pieces(part)]


def _place(metadata: Any) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(metadata.shard_offsets, metadata.shard_sizes))


class ThroughDirectory(RemarkingProgram):
    """Saves its state in a form with `torch.distributed.checkpoint`, and loads it into a new model."""

    form = ""

    def statements(self) -> Iterator[str]:
        """Yield the values that changed."""
        adapter = self.adapter
        save, load = (getattr(adapter, name.format(self.form)) for name in ("{}_state_dict", "load_{}_state_dict"))
        with self._inside(), shared_directory(self.files) as folder, refusals_as_errors():
            dcp.save(dict(save(self.model)), checkpoint_id=folder)
            before = {fqn: value.detach().clone() for fqn, value in adapter.full_state_dict(self.model).items()}
            adapter.finish(self.model)
            self.rebuild({})
            state = dict(save(self.model))
            dcp.load(state, checkpoint_id=folder)
            load(self.model, state)
            after = adapter.full_state_dict(self.model)
            for fqn, value in before.items():
                if not torch.equal(value, after[fqn]):
                    yield f"{fqn} differs after the {self.form} state went through a directory"


def not_finite(form: str) -> RunMode:
    """Return the mode for a case whose parameters are saved in a form while they are not finite."""
    return RunMode(rank_jobs.run_as, (NotFinite, {"form": form}), review=review_remarks)


def through_directory(form: str) -> RunMode:
    """Return the mode for a case whose state in a form goes through a directory."""
    return RunMode(rank_jobs.run_as, (ThroughDirectory, {"form": form}), review=review_remarks)


SHARDS_PLACED = RunMode(rank_jobs.run_as, (ShardsPlaced, {}), review=review_remarks)
REFUSED = RunMode(rank_jobs.run_as, (RefusingProgram, {}), review=review_remarks)
