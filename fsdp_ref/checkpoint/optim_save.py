"""Turns the state of the ranks' shards into the state that one process would have, by name.

Unit by unit and entry by entry: the pieces of one entry (say ``exp_avg``) of one unit are gathered into one buffer, copied
out parameter by parameter, and dropped before the next. An entry with another shape than the parameter (a step count, a flag, a
user's entry) is copied unchanged. Ranks first exchange records of their entries, so that a rank without elements of a parameter
returns its state too, and an error names ranks that disagree.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fsdp_ref.checkpoint.optim_index import (
    Key,
    ModelIndex,
    Original,
    Stepped,
    is_named,
    same_values,
    stepped_groups,
)
from fsdp_ref.checkpoint.optim_records import Record, entry_of, merged, plain_names
from fsdp_ref.checkpoint.rows import Rows
from fsdp_ref.checkpoint.shards import Spread
from fsdp_ref.comm.collectives import gather_objects
from fsdp_ref.config import FullOptimStateDictConfig, StateDictSettings, StateDictType
from fsdp_ref.errors import FsdpRuntimeError, FsdpValueError, listing
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.naming import clean_tensor_name
from fsdp_ref.storage.views import flat_views


@dataclass(frozen=True, slots=True)
class Form:
    """How values are returned.

    Attributes:
        sharded: as DTensors, sharded on dimension 0.
        kept: this rank returns state at all.
        offload: values are on the CPU.
    """

    sharded: bool
    kept: bool
    offload: bool

    @classmethod
    def of(cls, settings: StateDictSettings, index: ModelIndex) -> Form:
        """Read the settings of a model."""
        config = settings.optim_state_dict_config
        full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
        everywhere = not (isinstance(config, FullOptimStateDictConfig) and config.rank0_only)
        return cls(not full, everywhere or index.is_first_rank, config.offload_to_cpu)

    def copied(self, value: Any) -> Any:
        """Return a copy that later steps do not change."""
        if isinstance(value, Tensor):
            return value.detach().to("cpu" if self.offload else value.device, copy=True)
        return copy.deepcopy(value)


def save_optim_state(
    index: ModelIndex, optim: Optimizer, given: Mapping[str, Any] | None, settings: StateDictSettings
) -> dict[str, Any]:
    """Return the optimizer's state by the names of the plain module.

    Args:
        index: the model.
        optim: its optimizer.
        given: the optimizer's own state dict; None: ``optim.state_dict()``.
        settings: the form of values. LOCAL is the same as SHARDED.

    Returns:
        ``{"state": {name: {entry: value}}, "param_groups": [...]}``, values copied; an empty dictionary on the other ranks
        with ``rank0_only``. Whole values have the shapes of the plain module; sharded ones are DTensors over the unit's
        shard group. ``param_groups`` is missing where ``given`` has none.

    Raises:
        FsdpRuntimeError: ranks have different entries, dtypes or values of one parameter.
        FsdpValueError: the optimizer has tensors that are no parameters of the model, or ``given`` has keys that are not the
            optimizer's; on every rank of the shard groups, whichever of them has them.

    Collectives:
        One exchange of objects over each shard group, then one all-gather, or one exchange of rows, per unit and entry. All
        ranks must call.
    """
    own = optim.state_dict() if given is None else given
    form = Form.of(settings, index)
    saving = _Saving(index, form, own)
    try:
        saving.read(optim)
    except FsdpValueError as error:  # a rank that raises tells the others first, so that they do not wait for it
        saving.unread = str(error)
    saving.exchange()
    state = saving.collect()
    if not form.kept:
        return {}
    saved: dict[str, Any] = {
        key: form.copied(value) for key, value in own.items() if key not in {"state", "param_groups"}
    }
    saved["state"] = state | saving.of_users()
    if "param_groups" in own:
        saved["param_groups"] = saving.param_groups()
    return saved


@dataclass(slots=True, eq=False)
class _Saving:
    """One save: this rank's entries, then the entries of all ranks, then the values."""

    index: ModelIndex
    form: Form
    own: Mapping[str, Any]
    unread: str = ""
    by_key: dict[Key, Stepped] = field(default_factory=dict)
    local: dict[Original, dict[str, Any]] = field(default_factory=dict)
    numbers: dict[Original, int] = field(default_factory=dict)
    records: dict[Original, Record] = field(default_factory=dict)
    elsewhere: dict[Original, dict[str, Any]] = field(default_factory=dict)
    spreads: dict[FlatHandle, Spread] = field(default_factory=dict)

    def read(self, optim: Optimizer) -> None:
        """Sort this rank's entries by original."""
        groups = stepped_groups(self.index, [group["params"] for group in optim.param_groups], named=is_named(self.own))
        self.by_key = {_clean(stepped.key): stepped for group in groups for stepped in group}
        for number, group in enumerate(self.own.get("param_groups", ())):
            for key in group["params"]:
                for original in self._stepped(key).originals:
                    self.numbers.setdefault(original, number)
        for key, state in self.own["state"].items():
            stepped = self.by_key.get(_clean(key))
            if stepped is not None:
                self.local.update(_by_original(stepped, state))

    def _stepped(self, key: Key) -> Stepped:
        found = self.by_key.get(_clean(key))
        if found is None:
            raise FsdpValueError(
                f"optim_state_dict: expected parameter keys of this optimizer ({listing(self.by_key, limit=10)}), got "
                f"{key!r}. Pass what optim.state_dict() returns."
            )
        return found

    def exchange(self) -> None:
        """Exchange records with the other ranks of each unit, and compare.

        Collectives:
            One exchange of objects over each shard group.
        """
        per_group: dict[dist.ProcessGroup, list[tuple[FlatHandle, list[Original]]]] = {}
        for handle, originals in self.index.handles():
            if handle.sharded:
                per_group.setdefault(handle.groups.shard, []).append((handle, originals))
            else:
                self.records.update((original, self._record(original)) for original in originals)
        problems: list[str] = []
        unread = [self.unread] if self.unread else []
        for group, handles in per_group.items():
            mine = [self._record(original) for _, originals in handles for original in originals]
            settings = [_settings(each) for each in self.own.get("param_groups", ())]
            per_rank = gather_objects((self.unread, mine, settings), group)
            unread += [f"rank {rank} of the shard group: {text}" for rank, (text, _, _) in enumerate(per_rank) if text]
            of_ranks = [records for _, records, _ in per_rank]
            members = [(handle, original) for handle, originals in handles for original in originals]
            plain = plain_names(record for records in of_ranks for record in records)
            for place, (handle, original) in enumerate(members):
                holders = handle.shard_map.owner_ranks(original.index) or range(len(of_ranks))
                self.records[original], differing = merged([records[place] for records in of_ranks], holders, plain)
                problems += [f"{original.name}{each}" for each in differing]
            self._place_elsewhere([original for _, original in members], of_ranks, [each for _, _, each in per_rank])
        axis = [] if self.index.groups.tensor is None else [self.index.groups.tensor]
        for group in [*per_group, *per_group, *axis] if len(per_group) > 1 else axis:
            # Twice over all groups: every rank learns the problems of other groups before any rank waits.
            found = gather_objects((unread, problems), group)
            unread = [text for theirs, _ in found for text in theirs]
            problems = [problem for _, theirs in found for problem in theirs]
        if unread:
            raise FsdpValueError(self.unread or " ".join(dict.fromkeys(unread)))
        if problems:
            raise FsdpRuntimeError(
                "optim_state_dict: expected each rank to have equal state for every parameter that it holds elements of, "
                f"got {listing(dict.fromkeys(problems))}. Step the same parameters on every rank, "
                "and change state on all of them."
            )

    def _record(self, original: Original) -> Record:
        state = self.local.get(original)
        entries = None if state is None else {name: entry_of(original, value) for name, value in state.items()}
        return Record(self.numbers.get(original), entries)

    def _place_elsewhere(
        self, members: Sequence[Original], of_ranks: Sequence[Sequence[Record]], settings: Sequence[Sequence[Any]]
    ) -> None:
        """Find the settings of what other ranks optimize and this one leaves out."""
        for place, original in enumerate(members):
            for rank, records in enumerate(of_ranks):
                number = records[place].group
                if original not in self.numbers and number is not None:
                    self.elsewhere.setdefault(original, settings[rank][number])

    def collect(self) -> dict[str, dict[str, Any]]:
        """Return all values by name.

        Collectives:
            One all-gather over the shard group per unit and entry.
        """
        values: dict[Original, dict[str, Any]] = {}
        for handle, originals in self.index.handles():
            wanted: dict[tuple[str, torch.dtype], list[Original]] = {}
            for original in originals:
                for name, entry in (self.records[original].entries or {}).items():
                    if entry.dtype is not None:
                        wanted.setdefault((name, entry.dtype), []).append(original)
            for (name, dtype), having in wanted.items():
                for original, value in self._returned(handle, name, dtype, having).items():
                    values.setdefault(original, {})[name] = value
        if not self.form.kept:
            return {}
        state: dict[str, dict[str, Any]] = {}
        for original in self.index.originals:
            known = self._entries(original)
            if known is not None:
                shaped = values.get(original, {})
                state[original.name] = {
                    name: shaped[name] if name in shaped else self.form.copied(value) for name, value in known.items()
                }
        return state

    def _entries(self, original: Original) -> dict[str, Any] | None:
        """Return the entries of one original in order, with those values that are not shaped like it."""
        local = self.local.get(original)
        if original.handle is None:
            return local
        entries = self.records[original].entries
        if entries is None:
            return None
        # Its own values where this rank has elements, on the device where the optimizer keeps them.
        mine = (local or {}) if original.handle.originals.present(original.index) else {}
        return {name: mine.get(name, entry.value) for name, entry in entries.items()}

    def _whole(
        self, handle: FlatHandle, name: str, dtype: torch.dtype, having: Sequence[Original]
    ) -> dict[Original, Tensor]:
        """Return one entry of a unit's originals in their own shapes; views of memory that is freed after this entry."""
        if not handle.sharded:
            return {original: self.local[original][name] for original in having}
        device = handle.config.device
        part_S = torch.zeros(handle.shard_map.shard_numel, dtype=dtype, device=device)
        pieces = handle.originals.pieces_of(part_S)
        for original in having:
            mine = self.local.get(original, {}).get(name)
            if isinstance(mine, Tensor) and pieces[original.index].numel():
                pieces[original.index].copy_(mine.detach())
        full_F = torch.empty(handle.shard_map.padded_numel, dtype=dtype, device=device)
        handle.gather_into(full_F, part_S)
        views = flat_views(full_F, handle.layout)
        return {original: views[original.index] for original in having}

    def _returned(
        self, handle: FlatHandle, name: str, dtype: torch.dtype, having: Sequence[Original]
    ) -> dict[Original, Any]:
        """Return copies of one entry of a unit's originals in the wanted form; the unit's whole buffer is freed on return."""
        if self.form.sharded and handle.sharded:
            return self._chunks(handle, name, dtype, having)
        views = self._whole(handle, name, dtype, having)
        gathers = {original: each.gather for original in views if (each := original.extension) is not None}
        if self.form.kept:
            whole = {o: gathers[o](view) if o in gathers else view for o, view in views.items()}
            return {original: self.form.copied(view) for original, view in whole.items()}
        for original, gather in gathers.items() if handle.groups.is_first else ():
            gather(views[original])  # rank 0 returns it
        return {}

    def _chunks(
        self, handle: FlatHandle, name: str, dtype: torch.dtype, having: Sequence[Original]
    ) -> dict[Original, Any]:
        """Return one entry of a unit's originals by rows."""
        nothing = torch.empty(0, dtype=dtype, device=handle.config.device)
        pieces = {original.index: self.local.get(original, {}).get(name, nothing) for original in having}
        rows = Rows(handle).from_pieces(pieces, dtype)
        if handle not in self.spreads:
            self.spreads[handle] = Spread(handle)
        entry = self.spreads[handle].entry
        shapes = [handle.layout.params[original.index].shape for original in having]
        chunks = [entry(rows[o.index], shape, o.extension) for o, shape in zip(having, shapes, strict=True)]
        return {o: chunk.cpu() if self.form.offload else chunk for o, chunk in zip(having, chunks, strict=True)}

    def of_users(self) -> dict[str, Any]:
        """Return the user's entries that belong to no parameter."""
        found = {str(key): value for key, value in self.own["state"].items() if _clean(key) not in self.by_key}
        if found:
            warnings.warn(
                f"optim_state_dict: expected entries of parameters, got also {listing(found)}, which belong to none. They "
                "are copied as this rank has them.",
                UserWarning,
                stacklevel=4,
            )
        return {key: self.form.copied(value) for key, value in found.items()}

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the settings of each group with the names of its parameters.

        A parameter that this rank leaves out, because it has no element of it, is in the first group with its settings on other
        ranks.
        """
        groups = [
            (_settings(group), [o for key in group["params"] for o in self._stepped(key).originals])
            for group in self.own["param_groups"]
        ]
        for original, settings in self.elsewhere.items():
            found = next((members for own, members in groups if same_values(own, settings)), None)
            if found is None:
                groups.append((settings, [original]))
            else:
                found.append(original)
        saved: list[dict[str, Any]] = []
        for settings, members in groups:
            if self.elsewhere or any(each.optimized is not each.param for each in members):
                # Optimizers do not know the order inside a flat parameter, nor the parameters that they leave out.
                members = [original for original in self.index.originals if original in set(members)]
            names = [original.name for original in members]
            called = {"param_names": list(names)} if "param_names" in settings else {}
            saved.append(
                {**{key: self.form.copied(value) for key, value in settings.items()}, **called, "params": names}
            )
        return saved


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _clean(key: Any) -> Any:
    return clean_tensor_name(key) if isinstance(key, str) else key


def _by_original(stepped: Stepped, state: Mapping[str, Any]) -> Iterator[tuple[Original, dict[str, Any]]]:
    """Cut the state of a flat parameter into that of its originals; any other is that of one original."""
    handle = stepped.flat
    if handle is None:
        yield stepped.originals[0], dict(state)
        return
    cut = {
        name: handle.originals.pieces_of(value.detach())
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == handle.shard_S.shape
    }
    for original in stepped.originals:
        yield original, {name: cut[name][original.index] if name in cut else value for name, value in state.items()}
