"""The forms of ``state_dict()``, saved and loaded.

It works unit by unit through the module's own state-dict hooks, the same for the wrapper and the composable API. Every module
that shows parameters of a unit has the hooks, so that the state of any part is right. The outermost one opens the unit. For
full state it summons the full parameters, and beside the state itself only this unit and those around it are full. For sharded
state ranks exchange rows for pieces of flat shards (see ``rows``), and parameters are shown without values, unless other code
than ``nn.Module``'s sees them: then they are summoned too. For local state nothing is gathered. Then each module turns its own
entries into the form (see ``shards``), or its form into what ``nn.Module`` copies; missing and unexpected keys, and sizes, are
reported by ``nn.Module``. Names lose the wrappers' prefixes.

Collectives over the unit's shard group: full, one all-gather for each unit; sharded, one exchange instead, to load one for each
module, one of descriptions for each tree of units and, for each parameter with another layout, an all-gather. All ranks must
call, also with ``rank0_only``. Local: none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fsdp_ref.access.summon import SummonOptions, refuse_running, summon
from fsdp_ref.annotations import OWNERS_KEY, owners_of, unit_of, units_in
from fsdp_ref.checkpoint.rows import Rows, load_shard, values_are_read, whole
from fsdp_ref.checkpoint.shards import Spread, compare_ranks, take_flat_shard
from fsdp_ref.comm.tensor_parallel import is_dtensor
from fsdp_ref.compat import RunningCall, metadata_being_loaded, metadata_of
from fsdp_ref.config import FullStateDictConfig, ShardingStrategy, StateDictType
from fsdp_ref.errors import TrainingStateError, UnshardConflictError, UnsupportedError, listing
from fsdp_ref.fence.optimizers import sends_from_rank0
from fsdp_ref.naming import FLAT_PARAM, FSDP_PREFIX, FSDP_WRAPPED_MODULE, clean_tensor_name, join_fqn
from fsdp_ref.runtime.root import close_ended, lazy_init
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.states import UnitState

if TYPE_CHECKING:
    from fsdp_ref.storage.extension import ParameterExtension


class OpenState:
    """A unit whose state, or part of it, is being collected or loaded.

    The root knows it (``Root.visits``): the hook that ends it does not come when collecting raised.

    Attributes:
        running: the call of ``nn.Module`` that collects or loads.
        module: the outermost module of that part; its hook ends it.
        form: the form that the unit's entries have.
        rows: parameters are shown without values, which are in this rank's rows, by the parameter's index.
        indices: the parameters' indices, by module and name.
        errors: what ``nn.Module`` found wrong while loading; it is its own list.
    """

    def __init__(
        self,
        unit: Unit,
        module: nn.Module,
        form: StateDictType,
        parameters: AbstractContextManager[None],
        *,
        fresh: bool,
        rows: dict[int, Tensor] | None = None,
    ) -> None:
        self.module = module
        self.form = form
        self._unit = unit
        self._parameters = parameters
        self._fresh = fresh
        self.rows = rows
        managed = enumerate(unit.handle.originals.managed)
        self.indices = {(site.module, site.name): index for index, each in managed for site in each.sites}
        self.errors: list[str] = []
        # Keep the source of each copy: a user's method may have made it, and its memory would be reused.
        self._copies: dict[object, tuple[Tensor, Tensor]] = {}
        self.running = RunningCall.of_outermost_module_method()

    @cached_property
    def spread(self) -> Spread:
        """Over which ranks entries are spread."""
        return Spread(self._unit.handle)

    def entry(self, shown: Tensor, place: tuple[nn.Module, str]) -> Tensor:
        """Return the entry of a summoned parameter, whose memory will be freed; one for all names of a tied parameter."""
        originals = self._unit.handle.originals
        index = self.indices[place]
        extension = originals.extensions[index]
        value = shown if extension is None else extension.flatten(shown)
        # Not by `data_ptr`, which is 0 without elements: a rank that holds none would gather once for each name, others once.
        memory = value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.dtype
        key = index if self.rows is not None else (index, memory)
        if key not in self._copies:
            self._copies[key] = value, self._converted(value.detach(), index, extension)
        return self._copies[key][1]

    def _converted(self, value: Tensor, index: int, extension: ParameterExtension | None) -> Tensor:
        offload = self._unit.state_dict_settings.state_dict_config.offload_to_cpu
        if self.form is StateDictType.SHARDED_STATE_DICT:
            chunk = (
                self.spread.chunk(value, extension)
                if self.rows is None
                else self.spread.entry(self.rows[index], tuple(value.shape), extension)
            )
            return chunk.cpu() if offload else chunk
        value = value if extension is None else extension.gather(value)
        return value.to("cpu", copy=True) if offload else value.clone()

    def close(self) -> None:
        """Keep edits, show and free as before, and forget a root that was only made for this."""
        self.errors[:] = [" ".join(map(clean_tensor_name, text.split(" "))) for text in self.errors]
        try:
            self._parameters.__exit__(None, None, None)
        finally:
            if self._fresh and self._unit.root is not None:
                # Saving must not decide which unit is the root.
                self._unit.root.disband()


def install(unit: Unit) -> None:
    """Give the modules of a new unit, and the one that users call for it, their hooks; copies of them have hooks too."""
    names: dict[nn.Module, list[str]] = {module: [] for module in (unit.holder, *unit.modules)}
    sites = [site for managed in unit.handle.originals.managed for site in managed.sites]
    elsewhere = {site.module for site in sites} - set(names)
    if elsewhere:  # a tied parameter, in modules of units below: a surrounding module summons this unit first
        around = [module for module in unit.module.modules() if not elsewhere.isdisjoint(module.modules())]
        names |= {module: [] for module in around if module not in names}
    for site in sites:
        names[site.module].append(site.name)
    for module, params in names.items():
        owners = owners_of(module)
        if not owners:
            module.register_state_dict_pre_hook(_before_save)
            module.register_state_dict_post_hook(_after_save)
            module.register_load_state_dict_pre_hook(_before_load)
            module.register_load_state_dict_post_hook(_after_load)
        owners[unit] = params


# ------------------------------------------------------------------------------------------------- opening and closing


def _form(unit: Unit) -> StateDictType:
    """Return the form of the unit's entries: what is set, and full where nothing is sharded."""
    replicated = unit.config.strategy is ShardingStrategy.NO_SHARD
    return StateDictType.FULL_STATE_DICT if replicated else unit.state_dict_settings.state_dict_type


def _open_state(unit: Unit) -> OpenState | None:
    visit = None if unit.root is None else unit.root.visits.get(unit)
    return visit if isinstance(visit, OpenState) else None


def _is_open(unit: Unit) -> bool:
    open_state = _open_state(unit)
    return open_state is not None and not open_state.running.ended()


def _closed_units(module: nn.Module, *, loading: bool) -> list[Unit]:
    """Return the units that own parameters of the module and must be opened, once all below it agree to it."""
    # Units were made children first, and the outermost decides which is the root.
    closed = [unit for unit in reversed(owners_of(module)) if not unit.handle.empty and not _is_open(unit)]
    for unit in dict.fromkeys((*closed, *units_in(module))) if closed else ():
        if not unit.handle.empty and not _is_open(unit):
            _check(unit, module, loading=loading)
    return [unit for unit in closed if unit.state is not UnitState.SUMMONED]  # what a user has summoned is whole


def _open(unit: Unit, module: nn.Module, *, loading: bool) -> None:
    fresh = unit.root is None
    root = lazy_init(unit)
    form = _form(unit)
    if form is not unit.state_dict_settings.state_dict_type and not loading:
        warnings.warn(
            f"{unit.state_dict_settings.state_dict_type.name} was set for a unit with NO_SHARD "
            f"({unit.name or type(unit.module).__name__}), which has no shards: full_state_dict will be returned.",
            UserWarning,
            stacklevel=4,
        )
    parameters: AbstractContextManager[None] = nullcontext()
    rows: dict[int, Tensor] | None = None
    if form is StateDictType.LOCAL_STATE_DICT:
        root.recover()
        unit.absorb()
    else:
        rank0_only = not loading and _left_to_rank_zero(unit) and not _takes_part(unit)
        by_rows = form is StateDictType.SHARDED_STATE_DICT and unit.handle.sharded
        by_rows = by_rows and not values_are_read(unit.holder, loading=loading)
        by_rows = by_rows and not (loading and unit.handle.originals.extended)  # an extension writes to what it shows
        parameters = summon(unit.holder, SummonOptions(False, loading, rank0_only, gather=not by_rows))
        rows = {} if by_rows else None
    parameters.__enter__()
    if rows is not None and not loading:
        shard_S = unit.handle.shard_S
        rows = Rows(unit.handle).from_pieces(dict(enumerate(unit.handle.originals.shard_views())), shard_S.dtype)
    root.visits[unit] = OpenState(unit, module, form, parameters, fresh=fresh, rows=rows)


def _check(unit: Unit, module: nn.Module, *, loading: bool) -> None:
    """Refuse units that cannot be saved or loaded now.

    Raises:
        UnshardConflictError: Forward or backward runs, or a user has summoned parameters that would have to be cut or replaced.
        TrainingStateError: Loading inside ``no_sync``.
        UnsupportedError: Local state of a part of a unit; a flat parameter that is to be loaded from rank 0 by torch's functions.
    """
    close_ended(unit)
    form = _form(unit)
    call = "load_state_dict" if loading else "state_dict"
    refuse_running(unit)
    whole = form is StateDictType.FULL_STATE_DICT and not (unit.handle.empty or unit.handle.originals.extended)
    if unit.state is UnitState.SUMMONED and (loading or not whole):
        raise UnshardConflictError(
            f"{call} of {unit!r} ({form.name}) inside summon_full_params: expected parameters that are not summoned. "
            f"Call {call} before or after."
        )
    if loading and not unit.sync_gradients:
        raise TrainingStateError(
            f"load_state_dict of {unit!r} inside no_sync: expected a unit whose gradients are all reduced, got one that "
            "accumulates gradients of the parameters that would be replaced. Load before or after."
        )
    if loading and not unit.handle.empty and not unit.config.use_orig_params and sends_from_rank0():
        # They send what ``named_parameters()`` shows: one flat parameter, which has no name in rank 0's state.
        raise UnsupportedError(
            f"load_state_dict of {unit!r} with broadcast_from_rank0: expected original parameters, whose names are "
            "those of the state that rank 0 has, got one flat parameter (use_orig_params=False) of "
            f"{listing(unit.handle.fqns)}. Pass use_orig_params=True to FullyShardedDataParallel, or load the whole "
            "state on every rank (full_state_dict=True without broadcast_from_rank0)."
        )
    if form is StateDictType.LOCAL_STATE_DICT and _is_cut(unit, list(module.modules())):
        raise UnsupportedError(
            f"{call} of {type(module).__name__}: expected a module with whole units, since {form.name} has one flat "
            f"shard for each, got a part of {unit!r}. Call it on the unit or on a module around it, or set "
            "SHARDED_STATE_DICT."
        )


def _is_cut(unit: Unit, modules: list[nn.Module]) -> bool:
    """Return whether ``modules`` show parameters of the unit and lack the module that it shards."""
    return unit.module not in modules and any(each.__dict__.get(OWNERS_KEY, {}).get(unit) for each in modules)


def _left_to_rank_zero(unit: Unit) -> bool:
    """Return whether the unit's state is another rank's to return."""
    config, groups = unit.state_dict_settings.state_dict_config, unit.config.groups
    axis = groups.tensor if unit.root is None else unit.root.tensor_group
    first = groups.is_first and (axis is None or axis.rank() == 0)
    return isinstance(config, FullStateDictConfig) and config.rank0_only and not first


def _takes_part(unit: Unit) -> bool:
    """Return whether rank 0's entries of the unit have parts on this rank."""
    return bool(unit.handle.originals.extended) and unit.config.groups.is_first


def _leave(module: nn.Module) -> None:
    for unit in owners_of(module):
        open_state = _open_state(unit)
        if open_state is not None and open_state.module is module and unit.root is not None:
            del unit.root.visits[unit]
            open_state.close()


# --------------------------------------------------------------------------------------------------------------- saving


def _before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for unit in _closed_units(module, loading=False):
        _open(unit, module, loading=False)


def _after_save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for unit in owners_of(module):
        open_state = _open_state(unit)
        if open_state is not None and (_takes_part(unit) or not _left_to_rank_zero(unit)):
            _convert(unit, open_state, module, state, prefix)
        for name in module._buffers:  # those that were cast in their own dtype
            dtype = unit.buffers.original_dtype(module, name)
            if dtype is not None and prefix + name in state:
                state[prefix + name] = state[prefix + name].to(dtype)
        if module is unit.holder or (open_state is not None and open_state.module is module):
            _finish(unit, state, prefix)
    if FSDP_WRAPPED_MODULE in module._modules:
        _rename(state, prefix, clean_tensor_name)
        # Paths of modules, with their versions, as in the plain module: the inner module's stands for its wrapper's.
        _rename(metadata_of(state), prefix, clean_tensor_name)
    _leave(module)


def _convert(unit: Unit, open_state: OpenState, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Give the module's own entries their form."""
    for name in owners_of(module)[unit]:
        key = prefix + name
        if open_state.form is StateDictType.LOCAL_STATE_DICT:
            state.pop(key, None)
        elif isinstance(state.get(key), Tensor):
            state[key] = open_state.entry(state[key], (module, name))
    if open_state.form is StateDictType.LOCAL_STATE_DICT and module is unit.module:
        state[prefix + FLAT_PARAM] = open_state.spread.raw.entry()


def _finish(unit: Unit, state: dict[str, Any], prefix: str) -> None:
    """Apply the options to all entries at and below a unit: drop them for another rank, or move them to the CPU."""
    offload = unit.state_dict_settings.state_dict_config.offload_to_cpu
    if not (offload or _left_to_rank_zero(unit)):
        return
    for key in [key for key in state if key.startswith(prefix)]:
        if _left_to_rank_zero(unit):
            del state[key]
        elif isinstance(state[key], Tensor):
            state[key] = state[key].cpu()


def _rename(state: dict[str, Any], prefix: str, change: Callable[[str], str]) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        value = state.pop(key)
        state[(prefix + change(key.removeprefix(prefix))).removesuffix(".")] = value


# -------------------------------------------------------------------------------------------------------------- loading


def _before_load(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, *reports: list[str]
) -> None:
    closed = _closed_units(module, loading=True)
    # A surrounding visit has already compared its entries.
    trees = [[unit] if unit.root is None else unit.root.units for unit in closed]
    compared = {each.config.groups.shard for tree in trees for each in tree if _is_open(each)}
    for unit in closed:
        group = unit.config.groups.shard
        if unit.state_dict_settings.state_dict_type is StateDictType.SHARDED_STATE_DICT and group not in compared:
            compared.add(group)
            axes = (each.config.groups.tensor for each in (*closed, *units_in(module)))
            compare_ranks(state, prefix, group, next((axis for axis in axes if axis is not None), None))
        _open(unit, module, loading=True)
    if FSDP_WRAPPED_MODULE in module._modules:
        _rename(state, prefix, lambda name: join_fqn(FSDP_WRAPPED_MODULE, name))
        _wrap_paths(metadata_being_loaded(), prefix)
    for unit, names in owners_of(module).items():
        open_state = _open_state(unit)
        if open_state is None:
            continue
        open_state.errors = reports[2]
        if open_state.form is StateDictType.LOCAL_STATE_DICT:
            # Here, and not where an entry is found: another rank may lack it.
            take_flat_shard(unit, open_state.spread.raw, module, state, prefix, reports)
            continue
        own = state.get(prefix + FLAT_PARAM) if module is unit.module else None
        if isinstance(own, Tensor) and own.data_ptr() == unit.handle.shard_S.data_ptr():
            del state[prefix + FLAT_PARAM]  # ``set_model_state_dict`` also passes the model's own entries
        if open_state.rows is not None:
            load_shard(unit.handle, module, {name: open_state.indices[module, name] for name in names}, state, prefix)
        for name in names:
            param = module._parameters.get(name)
            _take_whole(unit, param, state, prefix + name, reports[2])
            extension = unit.handle.originals.extended.get((module, name))
            value = state.get(prefix + name)
            if (
                extension is not None
                and isinstance(value, Tensor)
                and value.shape == extension.shape
                and value is not param
            ):
                state[prefix + name] = extension.unflatten(extension.cut(value))


def _wrap_paths(metadata: dict[str, Any], prefix: str) -> None:
    """Give each path below a wrapper the plain module's metadata: the version that the state was saved with."""
    for path, of_module in list(metadata.items()):
        name = f"{path}." if path else ""
        below = name.removeprefix(prefix)
        if name.startswith(prefix) and not below.startswith(FSDP_PREFIX):
            metadata.setdefault(f"{prefix}{FSDP_PREFIX}{below}".removesuffix("."), dict(of_module))


def _take_whole(unit: Unit, param: nn.Parameter | None, state: dict[str, Any], key: str, errors: list[str]) -> None:
    """Put the whole tensor where ``nn.Module`` looks for it."""
    value = state.get(key)
    if not is_dtensor(value):
        return
    if unit.state_dict_settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
        state[key] = whole(value)
        return
    form = unit.state_dict_settings.state_dict_type.name
    errors.append(
        f"{clean_tensor_name(key)}: expected a whole tensor, since {form} is set, got a sharded one (DTensor). Set "
        "SHARDED_STATE_DICT to load it."
    )
    state[key] = param


def _after_load(module: nn.Module, incompatible: Any) -> None:
    if unit_of(module) is not None:
        for names in (incompatible.missing_keys, incompatible.unexpected_keys):
            names[:] = [clean_tensor_name(name) for name in names]
    _leave(module)
