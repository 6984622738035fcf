"""What an implementation can claim.

A capability is a tag that an implementation lists in `capabilities`. Checks name the tags they need; a check whose
tags are not all claimed is reported "not claimed". Claims are the implementation's own: nothing is inferred from its
code.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from fsdp_testing.cases.records.axes import AXES, Option
from fsdp_testing.cases.records.specs import SETTINGS
from fsdp_testing.errors import InvalidImplementation

CAPABILITIES: dict[str, str] = {
    # strategies
    "full_shard": "parameters, gradients and optimizer state are sharded; parameters are freed after forward",
    "shard_grad_op": "gradients and optimizer state are sharded; parameters are whole from forward to backward only",
    "no_shard": "every rank holds whole parameters, as in ZeRO-1 and ZeRO-2; gradients are averaged",
    "hybrid": "sharded inside a group of ranks, replicated across groups",
    # wrapping
    "nested_wrapping": "units chosen by name, one inside another",
    "policy_wrapping": "units chosen by a policy (module classes, size)",
    "policy_beside_units": "units chosen by a policy beside others that are chosen by name",
    "ignored_parameters": "parameters that stay outside the implementation",
    # schedule
    "no_sync": "gradients of some micro-batches stay local until a later one is reduced",
    "accumulate_without_no_sync": "several reduced backward passes add up",
    "forward_only": "a forward pass need not be followed by a backward pass; eval, no_grad and inference included",
    "several_models": "two wrapped models may run in one graph, and each while the other is in `no_sync`",
    "several_forwards": "several forward passes may come before their backward passes",
    "backward_twice": "a second backward may run through a kept graph",
    "second_order": "a loss may be computed from gradients",
    "backward_after_no_sync": "gradients are reduced if forward runs inside no_sync and backward outside",
    "outdated_backward": "a backward is refused if a step has changed values that it needs, as in one process",
    "backward_inputs": "`backward(inputs=...)` gives gradients to the named parameters alone, equal to those of one "
    "process",
    "input_gradients": "inputs that require gradients get this rank's own gradients, as from the plain module",
    "inner_forward": "a forward may call the module inside the wrapper directly",
    "inference_mode": "forward passes under torch.inference_mode",
    "late_optimizer": "the optimizer may be built after training has begun",
    "whole_parameter_steps": "an optimizer may step by norms of whole parameters, as LARS, LAMB and Adafactor do",
    "tensor_parallel": "modules cut by tensor parallelism over one mesh axis are sharded over the other",
    # parameters
    "shared_parameters": "one parameter under several names inside one unit",
    "shared_across_units": "one parameter used by several units",
    "reused_modules": "one module called several times in a forward pass",
    "frozen_parameters": "parameters with requires_grad=False from the start",
    "all_parameters_frozen": "models without any trainable parameter",
    "thawed_parameters": "requires_grad may change between iterations",
    "unused_parameters": "parameters that no rank uses in some iteration",
    "unused_parameters_differ": "parameters that only some ranks use in some iteration",
    "unused_gradient_is_none": "a parameter that no rank used has gradient None, as in one process",
    "uneven_parameters": "sizes that the number of ranks does not divide, fewer elements than ranks included",
    "zero_dim_parameters": "0-dimensional parameters",
    "empty_parameters": "parameters without elements",
    "strided_parameters": "parameters that are not contiguous, channels-last included",
    "integer_parameters": "parameters of whole numbers, which do not train, as quantized weights are",
    "mixed_dtype_units": "parameters of several dtypes inside one unit",
    "frozen_mixed_unit": "trainable and frozen parameters inside one unit",
    "container_outputs": "units and models that return tuples, lists, dicts, named tuples, dataclasses",
    "forward_methods": "a unit's methods beside forward may compute, once they are registered",
    "opaque_outputs": "units that return objects of the user's own classes",
    "parameter_outputs": "units that return a parameter of theirs, or a part of it",
    "inplace_on_output": "the caller may change a unit's output in place, even if it is a view",
    "loss_bypasses_output": "a loss may use a tensor that a unit stored instead of its output",
    "forward_edits": "in-place edits of parameters in forward are kept, if all ranks make the same edits",
    "buffers": "modules with buffers, which every rank computes from its own data",
    "uneven_batches": "ranks with different numbers of rows, including none",
    # numbers
    "mixed_precision": "parameters compute in a lower dtype than they are stored in",
    "reduce_dtype": "gradients are reduced in a separate dtype",
    "buffer_dtype": "floating-point buffers have a separate dtype",
    "clip_grad_norm": "gradients are clipped by their total norm over all ranks",
    "loss_scaling": "a loss scaler skips a step on every rank if a gradient of one is not finite",
    "error_if_nonfinite": "on request, clipping raises on every rank if the norm is not finite",
    "cpu_offload": "sharded parameters and gradients live on the CPU",
    "compiled": "units, and wrapped models, may be compiled by `torch.compile`",
    # access and state
    "dtype_cast": "`module.to(dtype)` between wrapping and the first forward",
    "dtype_cast_later": "`module.to(dtype)` after forwards have run",
    "deep_copies": "a wrapped model can be copied by `copy.deepcopy`",
    "data_assignment": "a parameter may be given new storage by `p.data = ...` between iterations",
    "in_place_edits": "a parameter may be changed in place, as by an optimizer, between iterations",
    "gradient_edits": "some reduced gradients may be changed in place or set to None while others stay",
    "strict_state": "a full state with a missing, an unknown or a wrongly shaped parameter is refused on every rank",
    "reordered_optimizer": "optimizer state is loaded by name, whatever the order of the optimizer's parameters",
    "user_entries": "`state` of the optimizer takes what a user keeps there, and saves and loads it",
    "summon_writeback": "full parameters can be gathered, edited and written back",
    "parameter_replacement": "a parameter of a module may be replaced while full parameters are gathered",
    "storage_replacement": "a parameter may be given new storage by `p.data = ...` while full parameters are gathered",
    "gradient_replacement": "a gradient may be replaced by another tensor while full gradients are gathered",
    "modules_replaced": "a submodule may be replaced before the first forward",
    "parameters_replaced": "a parameter of a module may be replaced after forwards have run",
    "unit_alone": "a unit may be called directly before the model is",
    "units_after_forward": "units that the model's forward left out may be called after it, with backwards of their own",
    "module_versions": "whole state names the versions of modules, and modules convert that of older versions alone",
    "extra_state": "whole state includes what modules return from `get_extra_state`",
    "full_state_dict": "the model's whole state can be saved and loaded",
    "sharded_state_dict": "the model's state can be saved and loaded in shards",
    "local_state_dict": "each rank's raw shards can be saved and loaded",
    "sub_groups": "a group of some of the ranks may shard a model",
    "optim_state": "optimizer state can be saved and loaded by parameter name",
    "optimizer_pieces": "each rank's optimizer state can be read without communication",
    # around
    "comm_hook": "a user's function reduces the gradients",
    "tensor_hooks": "a hook on a parameter receives the rank's own gradient before it is reduced, and may replace it",
    "accumulation_hooks": "a hook that runs after accumulation finds a parameter's reduced gradient",
    "early_hooks": "hooks that users put on parameters before they are wrapped run in every backward",
    "activation_checkpointing": "units recompute their forward in backward",
    "hidden_recomputation": "modules recompute inside a unit that returns custom objects, or whose stored tensor is "
    "used",
    "reentrant_checkpointing": "the recomputation may be reentrant: a backward inside the backward",
    "meta_init": "modules on the meta device are materialized while wrapping",
    "sync_module_states": "rank 0's parameters and buffers are broadcast while wrapping",
    "explicit_unshard": "units can be gathered and released by hand",
    "unit_trace": "unshard, reshard and free of every unit can be recorded",
    "streams": "work runs on several streams of the device's module, `torch.cpu` under observation",
    "limited_gathers": "the host runs ahead of the device by two all-gathers at most",
    "prefetch": "units are gathered before they are needed",
    "exception_recovery": "an exception in forward or backward leaves the model usable",
    # options that change no number
    **SETTINGS,
    # what axes bring (`cases/records/axes`)
    **{axis.claim: axis.meaning for axis in AXES if isinstance(axis, Option) and axis.meaning},
}


def check_capabilities(claimed: Iterable[str], where: str) -> frozenset[str]:
    """Return the claimed tags as a set.

    Raises:
        InvalidImplementation: A tag is not one of `CAPABILITIES`; every offender is listed.
    """
    tags = frozenset(claimed)
    unknown = sorted(tags - set(CAPABILITIES))
    if unknown:
        raise InvalidImplementation(
            f"{where}: expected known tags, got {', '.join(map(_with_nearest, unknown))}. "
            "Correct the spelling; `fsdp-verify list capabilities` shows every tag with its meaning."
        )
    return tags


def _with_nearest(tag: str) -> str:
    near = difflib.get_close_matches(tag, CAPABILITIES, 1)
    return f"{tag!r} (did you mean {near[0]!r}?)" if near else repr(tag)
