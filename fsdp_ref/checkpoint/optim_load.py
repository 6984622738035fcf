"""Turns state by name into this rank's optimizer state.

Every rank cuts the elements of its own shards out of whole values, one parameter and entry at a time: from its own dictionary,
from gathered DTensors, or from rank 0's broadcasts. Names, shapes and settings are compared with the model first, and all
problems are listed at once.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp_ref.checkpoint.optim_index import ModelIndex, Original, Stepped, same_values, stepped_groups
from fsdp_ref.checkpoint.optim_source import (
    Broadcast,
    Fetch,
    Outline,
    Source,
    Value,
    compare_names,
    malformed,
    of_all_ranks,
    outlined,
)
from fsdp_ref.checkpoint.rows import Rows, piece_of, rows_in, whole
from fsdp_ref.comm.collectives import broadcast_object
from fsdp_ref.comm.tensor_parallel import is_dtensor
from fsdp_ref.errors import FsdpValueError, listing


def load_optim_state(
    index: ModelIndex,
    tensors: Sequence[Sequence[Tensor]],
    optim: Optimizer | None,
    saved: Any,
    source: Source,
    *,
    named: bool = False,
) -> dict[str, Any]:
    """Return the state that this rank's optimizer can load.

    Args:
        index: the model.
        tensors: what the optimizer steps, by its parameter groups.
        optim: the optimizer, whose settings apply where ``saved`` has none; None: not made yet.
        saved: ``{"state": {name: {entry: value}}, "param_groups": [...]}``.
        source: who has it.
        named: the optimizer's keys are names (see ``stepped_groups``).

    Returns:
        A dictionary in the form of ``optim.state_dict()`` with the optimizer's own keys: for a flat parameter flat shards
        with their padding, for an original this rank's piece of it. Values are copies, in the dtypes they were saved in.

    Raises:
        FsdpValueError: names, shapes, dtypes or settings that do not fit the model or one another; all are listed. Tensors
            that are no parameters of the model.
        FsdpRuntimeError: ranks pass different names.

    Collectives:
        None for EVERY_RANK. For SHARDS an exchange of names, one of rows per unit and entry, and an all-gather for
        each other DTensor; for FIRST_RANK a broadcast of names and one per entry, over the groups of the outermost
        unit; for both one exchange of what does not fit. All ranks must call.
    """
    mine = source is not Source.FIRST_RANK or index.is_first_rank
    problem = malformed(saved, source) if mine else ""
    outline: Any = saved
    fetch: Fetch = lambda _key, _name, value: whole(value)
    if source is Source.FIRST_RANK:
        message = (problem, outlined(saved) if mine and not problem else None)
        problem, outline = broadcast_object(message, index.exchanged)
        fetch = Broadcast(index, saved if mine else None)
    elif source is Source.SHARDS:
        compare_names(index, saved, problem)
    if problem:
        raise FsdpValueError(problem)
    groups: Sequence[Sequence[Stepped]] = ()
    unread = ""
    try:
        groups = stepped_groups(index, tensors, named=named)
    except FsdpValueError as error:
        unread = str(error)
    loading = _Loading(index, groups, optim, outline, fetch)
    problems = [unread] if unread else loading.problems()
    if source is not Source.EVERY_RANK:
        problems = of_all_ranks(index, problems)  # optimizers may differ, and a rank that raises must not be waited for
    if unread:
        raise FsdpValueError(unread)
    if problems:
        raise FsdpValueError(
            "optim_state_dict_to_load: expected state of the parameters that the model and its optimizer have, got "
            f"{listing(problems)}. Load state that was saved from the same model and optimizer class."
        )
    state = loading.state()
    loaded = {key: copy.deepcopy(value) for key, value in outline.items() if key not in {"state", "param_groups"}}
    return loaded | {"state": state | loading.of_users(), "param_groups": loading.param_groups()}


@dataclass(frozen=True, slots=True, eq=False)
class _Loading:
    """One loading: the comparison, then the values."""

    index: ModelIndex
    groups: Sequence[Sequence[Stepped]]
    optim: Optimizer | None
    saved: Mapping[str, Any]
    fetch: Fetch

    def _key(self, original: Original) -> str | None:
        """Return the name of an original under which there is state."""
        return next((name for name in original.names if name in self.saved["state"]), None)

    def _listed(self) -> dict[str, int]:
        groups = self.saved.get("param_groups", ())
        return {name: number for number, group in enumerate(groups) for name in group["params"]}

    def problems(self) -> list[str]:
        """Compare names, shapes and dtypes with the model and one another; return all problems."""
        known, listed = self.index.by_name(), self._listed()
        problems = [f"{name}: no parameter of the model" for name in listed if name not in known]
        if "param_groups" in self.saved:
            problems += [
                f"{original.name}: in no parameter group of the state"
                for group in self.groups
                for stepped in group
                for original in stepped.originals
                if listed.keys().isdisjoint(original.names)
            ]
        for original in self.index.originals:
            key = self._key(original)
            if key is not None:
                problems += self._misshapen(original, self.saved["state"][key])
        for stepped in (each for group in self.groups for each in group):
            if stepped.flat is not None:
                problems += self._unlike([original for original in stepped.originals if 0 not in original.shape])
        return problems

    def _shaped(self, original: Original, name: str, value: Value) -> bool:
        """Return whether a value has one element per element of the parameter, to be cut like it."""
        if not isinstance(value, (Tensor, Outline)) or tuple(value.shape) != original.shape:
            return False
        return math.prod(original.shape) != 1 or self._like_parameters(name)

    def _like_parameters(self, name: str) -> bool:
        """Return whether an entry is shaped like its parameter: where that has one element, a step count looks the same."""
        known = self.index.by_name()
        decided = [
            tuple(state[name].shape) == known[key].shape
            for key, state in self.saved["state"].items()
            if key in known and math.prod(known[key].shape) != 1 and isinstance(state.get(name), (Tensor, Outline))
        ]
        return any(decided) if decided else name != "step"

    def _misshapen(self, original: Original, state: Mapping[str, Any]) -> Iterator[str]:
        handle = original.handle
        # Where the optimizer steps whole parameters any shape may be right: Adafactor's are those of rows and columns.
        if handle is None or (not handle.sharded and handle.originals.use_orig_params):
            return
        values = {name: value for name, value in state.items() if isinstance(value, (Tensor, Outline))}
        fits = {name for name, value in values.items() if tuple(value.shape) == original.shape}
        for name in (name for name, value in values.items() if value.ndim and name not in fits):
            # An entry of another kind (the user's, a step count) stands beside entries that fit, and is copied as it is.
            if not fits or self._like_parameters(name):
                yield f"{original.name}.{name}: shape {tuple(values[name].shape)} for {original.shape}"

    def _unlike(self, members: Sequence[Original]) -> Iterator[str]:
        """Say why the state of several originals cannot be that of one flat parameter."""
        states = {original: self._state(original) or None for original in members}
        having = {original: state for original, state in states.items() if state is not None}
        if not having:
            return
        first, like = next(iter(having.items()))
        for original, state in states.items():
            for name, value in like.items():
                shaped = self._shaped(first, name, value)
                if state is None or name not in state:
                    if state is not None or not shaped:
                        yield f"{original.name}.{name}: missing, while {first.name} of the same flat parameter has it"
                elif shaped is not self._shaped(original, name, state[name]):
                    yield f"{original.name}.{name}: a value of another kind than in {first.name}"
                elif shaped and state[name].dtype != value.dtype:
                    yield f"{original.name}.{name}: dtype {state[name].dtype}, {value.dtype} in {first.name}"
                elif not shaped and not same_values(state[name], value):
                    yield f"{original.name}.{name}: {state[name]}, {value} in {first.name} of the same flat parameter"
            for name in (state or {}).keys() - like.keys():
                yield f"{original.name}.{name}: missing in {first.name} of the same flat parameter"

    def _state(self, original: Original) -> Mapping[str, Any] | None:
        key = self._key(original)
        return None if key is None else self.saved["state"][key]

    def state(self) -> dict[Any, dict[str, Any]]:
        """Return this rank's state by the optimizer's keys.

        Collectives: those of the source, for every entry of the model whether this rank steps it or not.
        """
        places = {original: stepped for group in self.groups for stepped in group for original in stepped.originals}
        found: dict[Any, dict[str, Any]] = {}
        pieces = self._from_rows()
        for original in self.index.originals:
            key, stepped = self._key(original), places.get(original)
            entries = {} if key is None else self.saved["state"][key]
            if key is not None and stepped is not None and stepped.present:
                found.setdefault(stepped.key, {})
            for name, value in entries.items():
                piece = pieces.pop((original, name), None)
                elsewhere = isinstance(value, Outline) or is_dtensor(value)
                whole = self.fetch(key or "", name, value) if elsewhere and piece is None else value
                if stepped is None or not stepped.present:
                    continue
                state = found[stepped.key]
                if not self._shaped(original, name, value):
                    state.setdefault(name, _copied(whole))
                    continue
                piece = self._cut(original, whole) if piece is None else piece
                if stepped.flat is None:
                    state[name] = piece
                else:  # gaps and padding stay zero
                    if name not in state:
                        state[name] = torch.zeros_like(stepped.flat.shard_S, dtype=piece.dtype)
                    stepped.flat.originals.pieces_of(state[name])[original.index].copy_(piece)
        return {stepped.key: found[stepped.key] for group in self.groups for stepped in group if stepped.key in found}

    def _from_rows(self) -> dict[tuple[Original, str], Tensor]:
        """Return this rank's pieces of what is saved by rows, as sharded states are.

        Collectives: one exchange per unit and entry, over the unit's shard group.
        """
        found: dict[tuple[Original, str], Tensor] = {}
        for handle, originals in self.index.handles():
            rows: dict[tuple[str, torch.dtype], dict[Original, Tensor]] = {}
            for original in originals if handle.sharded else ():
                for name, value in (self._state(original) or {}).items():
                    mine = rows_in(value, handle, original.index) if self._shaped(original, name, value) else None
                    if mine is not None:
                        rows.setdefault((name, mine.dtype), {})[original] = mine
            for (name, dtype), of_originals in rows.items():
                numel = {original: handle.originals.pieces.get(original.index, (0, 0))[1] for original in of_originals}
                home = handle.shard_S.device
                pieces = {original: torch.empty(numel[original], dtype=dtype, device=home) for original in of_originals}
                Rows(handle).into_pieces(
                    {original.index: mine for original, mine in of_originals.items()},
                    {original.index: piece for original, piece in pieces.items()},
                )
                found.update(((original, name), piece) for original, piece in pieces.items())
        return found

    def _cut(self, original: Original, whole: Tensor) -> Tensor:
        """Return a copy of this rank's elements of a whole value, shaped like this rank's piece of the parameter."""
        handle = original.handle
        if handle is None:
            return whole.clone()
        whole = whole if original.extension is None else original.extension.cut(whole)
        spec = handle.layout.params[original.index]
        home = handle.shard_S.device
        if not handle.sharded:
            return torch.empty_strided(spec.shape, spec.stride, dtype=whole.dtype, device=home).copy_(whole)
        return piece_of(handle, original.index, whole).to(home, copy=True)

    def of_users(self) -> dict[str, Any]:
        """Return the entries that belong to no parameter."""
        known, listed = self.index.by_name(), self._listed()
        found = {key: value for key, value in self.saved["state"].items() if key not in known and key not in listed}
        if found:
            warnings.warn(
                f"optim_state_dict_to_load: expected names of parameters, got also {listing(found)}, which the model does "
                "not have. They are copied as they are.",
                UserWarning,
                stacklevel=4,
            )
        return {key: self._of_user(key, value) for key, value in found.items()}

    def _of_user(self, key: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return _copied(value)
        return {n: _copied(self.fetch(key, n, v)) if isinstance(v, Outline) else _copied(v) for n, v in value.items()}

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the settings that their parameters had.

        Raises:
            FsdpValueError: parameters of one group come from groups with different settings, or from another optimizer.
        """
        listed, given = self._listed(), self.saved.get("param_groups", ())
        present = [{} for _ in self.groups] if self.optim is None else self.optim.param_groups
        result: list[dict[str, Any]] = []
        for group, settings in zip(self.groups, present, strict=True):
            names = [name for stepped in group for original in stepped.originals for name in original.names]
            numbers = list(dict.fromkeys(listed[name] for name in names if name in listed))
            sources = [{k: v for k, v in given[n].items() if k not in {"params", "param_names"}} for n in numbers]
            if any(not same_values(source, sources[0]) for source in sources[1:]):
                raise FsdpValueError(
                    "optim_state_dict_to_load: expected one group of settings for the parameters of each group of the "
                    f"optimizer, got different settings for {listing(names)}. Make the optimizer with the groups it was "
                    "saved with; one flat parameter has one group, use_orig_params=True keeps several."
                )
            source = sources[0] if sources else {}
            self._refuse_other_class(settings, source)
            own = {key: value for key, value in settings.items() if key != "params"}
            result.append(copy.deepcopy({**own, **source}))
            result[-1]["params"] = [stepped.key for stepped in group]
        return result

    def _refuse_other_class(self, settings: Mapping[str, Any], source: Mapping[str, Any]) -> None:
        missing = [key for key in (() if self.optim is None else self.optim.defaults) if key not in source]
        unknown = [key for key in source if key not in settings]
        if source and missing and unknown:
            raise FsdpValueError(
                f"optim_state_dict_to_load: expected the settings of {type(self.optim).__name__}, got others: "
                f"{listing(unknown)} and none of {listing(missing)}. Load the state of an optimizer of the same class."
            )


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
