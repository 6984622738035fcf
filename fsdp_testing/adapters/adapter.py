"""Turns any implementation into one object with every method that the checks call.

An adapter's author fills in `TorchStyle`; `Adapter.of` completes it (or any other object that follows the protocol). A
missing method is replaced by one that works for torch-style models (the model's own method of that name, DTensor or
replicated parameters read in place, gathering through `full_parameters`), or by one that says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from fsdp_testing.adapters import defaults
from fsdp_testing.adapters.protocol import Division, Piece, Setup, StateEntry
from fsdp_testing.adapters.returned import checked
from fsdp_testing.adapters.shared.tensor_parallel import parallelised
from fsdp_testing.base.documentation import page
from fsdp_testing.cases.records.specs import DTYPES
from fsdp_testing.errors import InvalidImplementation

Model = nn.Module
Optimizer = torch.optim.Optimizer
State = Mapping[str, Any]
EmitUnit = Callable[[str, str, tuple[str, ...]], None]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

LEFT_OUT: Any = None
"""Placeholder for a method that `Adapter.of` fills in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchStyle:
    """An adapter as data: three required fields, and optional callables for what the defaults do not cover.

    FQNs are those of the module before it was wrapped. Every rank calls the methods in the same order. Methods that observe
    (`local_pieces`, `optimizer_pieces`, `units`, `gathered_bytes`) change nothing (no collective, no unshard, no reshard, no
    lazy initialisation) and may be called at any point between operations, even by one rank alone.

    Attributes:
        name: As registered; shown in reports.
        wrap: `(module, setup) -> model`, called on every rank.
        capabilities: What the implementation claims; everything else is reported as "not claimed" and not judged.
        source: Where the implementation documents its claims, for the report.
        no_sync: Context in which backwards accumulate on this rank; the next one outside reduces everything.
        clip_grad_norm: `(model, max_norm, norm_type)`: clip by the norm of all ranks' gradients and return that norm (0-dim
            plain tensor, before clipping). With the capability of that name it takes `error_if_nonfinite=True`.
        full_parameters: `(model, *, writeback)`: context with the full parameters by FQN; edits in place last if `writeback`.
        local_pieces: This rank's current part of each parameter, by FQN (tied parameters once, under the first name).
        optimizer_pieces: This rank's optimizer state, by FQN and state name: numbers, and tuples of `Piece` for what is sharded.
        named_parameters: The parameters an optimizer takes, by FQN; for a flat parameter the FQN of its unit plus `.flat`.
        named_buffers: Live buffers by FQN.
        division: How the mean over ranks is formed in a setup, for comparing low precision bit by bit.
        full_state_dict: Whole parameters and persistent buffers, on every rank. A plain `dict` has no versions of modules.
        load_full_state_dict: Load the result of any implementation's `full_state_dict`.
        sharded_state_dict: This rank's part, in any form that the implementation can load and torch.distributed.checkpoint
            can save: DTensors, or tensors whose names differ by rank. With `strict_state` another rank's part is refused.
        load_sharded_state_dict: Load the result of `sharded_state_dict` on the same world size.
        local_state_dict: This rank's shards as they are in memory, for a model with the same wrapping; no collective.
        load_local_state_dict: Load the result of `local_state_dict` on the same rank.
        full_optimizer_state: `{"state": {fqn: {name: value}}, "param_groups": [...]}` with complete tensors, on every rank;
            each group names its parameters under `params`. With `user_entries` also what a user keeps in `optimizer.state`, with
            parameters and under names of its own.
        load_full_optimizer_state: Load the result of `full_optimizer_state`, into a new optimizer too.
        sharded_optimizer_state: This rank's part in the same form, as torch.distributed.checkpoint saves it and fills it.
        load_sharded_optimizer_state: Load the result of `sharded_optimizer_state` after torch.distributed.checkpoint has
            filled it.
        register_comm_hook: `(model, state, hook)`: the user's hook reduces gradients from now on; called once, before the
            first forward. Once per unit and synchronised backward the hook is called with `state`, the unit's whole gradient
            on this rank (flat, undivided, in the dtype that is sent) and, if the unit is sharded, the tensor that receives
            this rank's span of the result; without it the gradient is reduced in place. Only the hook divides.
        unshard: `(model, unit FQN)`: gather one unit now.
        unshard_async: `(model, unit FQN)`: start gathering one unit, and return a function that waits for it; if it is not
            called, the unit's forward waits.
        reshard: `(model, unit FQN)`: free one unit's gathered parameters.
        units: `(unit FQN, FQNs of its parameters)` in the implementation's own order.
        trace_units: `(model, emit)`: context in which `emit(unit FQN, transition, parameter FQNs)` is called at each
            `unshard` (asked for), `gather` (memory is filled), `reshard` (given up) and `free` (memory is released).
        gathered_bytes: Bytes of gathered parameters that are currently allocated, by unit FQN, read from the storages. Shards
            do not count, and units without any may be left out. It is read after every operation, because a unit may be
            reported as free while its memory is not.
        finish: Called on every rank at the end of a case, to drop global state of the implementation.
        recover: What the implementation asks users to call after an exception in a forward or backward.
        build_optimizer: `(model, make)`: `make(parameters)` gives the case's optimizer. Return the object that `step` and
            `zero_grad` receive, with `param_groups`. Called after `wrap` and before the first training pass; with the claim
            `late_optimizer` a forward without backward may come first.
        backward: Instead of `loss.backward()`; inside `no_sync` if the program says so.
        grad_scaler: `(model, **options)`: the `torch.amp.GradScaler` that users train with, or one that is used like it.
        step: Instead of `optimizer.step()`.
        zero_grad: Instead of `optimizer.zero_grad(set_to_none)`; the optimizer is None if none is built. It also clears gradients
            that await reduction.
        step_clears_gradients: The engine's step clears gradients too. Every program then clears them after each step, so that
            the oracle does too.
        widest_dtype: Widest dtype in which the engine trains, if narrower than float64: wider models are built in this dtype,
            and bounds follow it.
        not_beside_tensor_parallel: Capabilities that are not claimed with tensor parallelism.
        built_on: Name of the implementation that this one varies, and whose defects it has; by default its own name.
            `dataclasses.replace` of another adapter keeps it.
    """

    name: str
    wrap: Callable[[nn.Module, Setup], nn.Module]
    capabilities: frozenset[str]
    source: str = ""
    no_sync: Callable[[Model], AbstractContextManager[Any]] = LEFT_OUT
    clip_grad_norm: Callable[[Model, float, float], torch.Tensor] = LEFT_OUT
    full_parameters: Callable[..., AbstractContextManager[Mapping[str, torch.Tensor]]] = LEFT_OUT
    local_pieces: Callable[[Model], Mapping[str, tuple[Piece, ...]]] = LEFT_OUT
    optimizer_pieces: Callable[[Model, Optimizer], Mapping[str, Mapping[str, StateEntry]]] = LEFT_OUT
    named_parameters: Callable[[Model], Iterable[tuple[str, nn.Parameter]]] = LEFT_OUT
    named_buffers: Callable[[Model], Iterable[tuple[str, torch.Tensor]]] = LEFT_OUT
    division: Callable[[Setup], Division] = LEFT_OUT
    full_state_dict: Callable[[Model], Mapping[str, torch.Tensor]] = LEFT_OUT
    load_full_state_dict: Callable[[Model, Mapping[str, torch.Tensor]], None] = LEFT_OUT
    sharded_state_dict: Callable[[Model], State] = LEFT_OUT
    load_sharded_state_dict: Callable[[Model, State], None] = LEFT_OUT
    local_state_dict: Callable[[Model], State] = LEFT_OUT
    load_local_state_dict: Callable[[Model, State], None] = LEFT_OUT
    full_optimizer_state: Callable[[Model, Optimizer], State] = LEFT_OUT
    load_full_optimizer_state: Callable[[Model, Optimizer, State], None] = LEFT_OUT
    sharded_optimizer_state: Callable[[Model, Optimizer], State] = LEFT_OUT
    load_sharded_optimizer_state: Callable[[Model, Optimizer, State], None] = LEFT_OUT
    register_comm_hook: Callable[[Model, object, Callable[..., Any]], None] = LEFT_OUT
    unshard: Callable[[Model, str], None] = LEFT_OUT
    unshard_async: Callable[[Model, str], Callable[[], None] | None] = LEFT_OUT
    reshard: Callable[[Model, str], None] = LEFT_OUT
    units: Callable[[Model], Sequence[tuple[str, tuple[str, ...]]]] = LEFT_OUT
    trace_units: Callable[[Model, EmitUnit], AbstractContextManager[Any]] = LEFT_OUT
    gathered_bytes: Callable[[Model], Mapping[str, int]] = LEFT_OUT
    finish: Callable[[Model], None] = LEFT_OUT
    recover: Callable[[Model], None] = LEFT_OUT
    build_optimizer: Callable[[Model, MakeOptimizer], Any] = LEFT_OUT
    backward: Callable[[Model, torch.Tensor], None] = LEFT_OUT
    grad_scaler: Callable[..., Any] = LEFT_OUT
    step: Callable[[Model, Any], None] = LEFT_OUT
    zero_grad: Callable[[Model, Any, bool], None] = LEFT_OUT
    step_clears_gradients: bool = False
    widest_dtype: str = "float64"
    not_beside_tensor_parallel: frozenset[str] = frozenset()
    built_on: str = ""

    def __post_init__(self) -> None:
        """Record the name in `built_on`, so that a variant keeps it."""
        if not self.built_on:
            object.__setattr__(self, "built_on", self.name)


JUDGED_BY_GRADIENTS = frozenset({"mixed_precision", "reduce_dtype", "buffer_dtype"})
"""Claims that are judged step by step, by the gradients that ranks show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter(TorchStyle):
    """The completed form: every method is callable. Made by `Adapter.of`, never by hand.

    Attributes:
        observes_locally: `local_pieces` needs no collective and may be called by one rank alone; if not, every rank calls it
            at the same point.
        missing: Methods that the implementation left out and that were filled in.
        reference: How other processes load the implementation: its registered name or import string. "" for an adapter that
            `registry.load` did not load; such an adapter stays in its process.
        observes_gradients: `local_pieces` shows gradients; if not, gradients are compared through the optimizer's step.
    """

    observes_locally: bool
    observes_gradients: bool
    missing: frozenset[str]
    reference: str = ""

    def claimed(self, tensor_parallel: int = 1) -> frozenset[str]:
        """Return the claims for this many ranks that share one model."""
        return self.capabilities - (self.not_beside_tensor_parallel if tensor_parallel > 1 else frozenset())

    def drawable(self, tensor_parallel: int = 1) -> frozenset[str]:
        """Return the claims that drawn cases may use: without those that only gradients decide, if it shows no gradients."""
        claims = self.claimed(tensor_parallel)
        return claims if self.observes_gradients else claims - JUDGED_BY_GRADIENTS

    @classmethod
    def of(cls, implementation: object) -> Adapter:
        """Complete `implementation`; a complete one is returned unchanged.

        Raises:
            InvalidImplementation: A required attribute is missing or of the wrong type; all of them are listed.
        """
        if isinstance(implementation, cls):
            return implementation
        _require(implementation)
        given_name: str = getattr(implementation, "name")  # noqa: B009 - `implementation` is foreign, checked by _require
        given = {f.name: method for f in fields(cls) if callable(method := getattr(implementation, f.name, None))}
        given = {name: checked(given_name, name, method) for name, method in given.items()}
        filled = defaults.methods(implementation, given)
        locally = "local_pieces" in given or "full_parameters" not in given
        return cls(
            name=given_name,
            capabilities=frozenset(getattr(implementation, "capabilities")),  # noqa: B009 - as above
            source=str(getattr(implementation, "source", "")),
            observes_locally=locally,
            observes_gradients=locally,
            missing=frozenset(filled) - frozenset(given),
            step_clears_gradients=bool(getattr(implementation, "step_clears_gradients", False)),
            widest_dtype=_dtype(implementation),
            not_beside_tensor_parallel=frozenset(getattr(implementation, "not_beside_tensor_parallel", ())),
            built_on=str(getattr(implementation, "built_on", "")) or given_name,
            **(filled | given | {"wrap": parallelised(defaults.checkpointing_outside(given["wrap"]))}),
        )


def _dtype(implementation: object) -> str:
    """Return the widest dtype, which must be a dtype of cases."""
    given: object = getattr(implementation, "widest_dtype", "float64")
    if given not in DTYPES:
        raise InvalidImplementation(
            f"implementation {getattr(implementation, 'name', '?')!r}: expected `widest_dtype` among "
            f"{', '.join(DTYPES)}, got {given!r}. Correct the adapter ({page('docs/adapters.md')})."
        )
    return str(given)


def _require(implementation: object) -> None:
    """Check name, capabilities and wrap: without them there is nothing to complete."""
    offenders = []
    name = getattr(implementation, "name", None)
    if not isinstance(name, str) or not name:
        offenders.append(f"`name` is {name!r}, not a non-empty string")
    capabilities = getattr(implementation, "capabilities", None)
    if not isinstance(capabilities, (frozenset, set)) or not all(isinstance(tag, str) for tag in capabilities):
        offenders.append(f"`capabilities` is {type(capabilities).__name__}, not a frozenset of strings")
    if not callable(getattr(implementation, "wrap", None)):
        offenders.append("`wrap` is not callable")
    if offenders:
        raise InvalidImplementation(
            f"implementation {name if isinstance(name, str) else type(implementation).__name__!r}: expected `name`, "
            f"`capabilities` and `wrap`, got: {'; '.join(offenders)}. Correct the adapter ({page('docs/adapters.md')})."
        )
