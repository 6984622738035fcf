"""Options that change no number: recomputation, prefetch, settings, and a hook of the user's that reduces gradients.

An implementation says by its claims which options it has (`fsdp_testing.cases.records.specs.SETTINGS`).
"""

from __future__ import annotations

from functools import partial

from fsdp_testing.cases.operations import EditFullParameters, Interrupt, Reload, UnusualBackward
from fsdp_testing.cases.records import (
    Batch,
    Case,
    MixedPrecisionSpec,
    Observe,
    PolicySpec,
    Step,
    WrappingPlan,
    ZeroGrad,
)
from fsdp_testing.checks.suites.check import (
    ADAMW,
    HYBRID,
    LOCKSTEP,
    ODD,
    PLAIN_SGD,
    TWO_BY_TWO,
    Check,
    accumulated,
    cases,
    check,
    every_unit,
    forward,
    iteration,
    iterations,
    micro_batch,
    no_sync_batch,
)
from fsdp_testing.checks.suites.hooks import AVERAGING, QUARTERING, REVIEWED, compressed_to
from fsdp_testing.checks.suites.loading_programs import KEEPS_VERSIONS
from fsdp_testing.checks.suites.one_pass import RECOMPUTES
from fsdp_testing.checks.suites.programs import OFFLOADED_ACTIVATIONS, PARTLY_OPTIMIZED, scaled
from fsdp_testing.checks.suites.state_programs import OF_ANOTHER_RANK, REFUSED, WRONG_STATES
from fsdp_testing.oracle.quantities import Comparison


def recomputed(model: str, *, reentrant: bool = False, outside: bool = False) -> WrappingPlan:
    """Return a plan with every unit that the zoo suggests, each recomputed.

    The reentrant way gives no gradients to a module none of whose inputs needs one, so the first unit is left out.
    """
    units = every_unit(model).units
    chosen = tuple(unit for unit in units if unit not in ("layers.0", "embed")) if reentrant else units
    return WrappingPlan(units, checkpointed=chosen, checkpoint_reentrant=reentrant, checkpoint_outside=outside)


def _recomputing(models: str, **how: bool) -> tuple[Case, ...]:
    program = (*iterations(2), micro_batch(2))
    return tuple(
        case
        for model in models.split()
        for case in cases(model, *program, wrapping=recomputed(model, **how), optimizer=ADAMW)
    )


_SAME = "torch.utils.checkpoint: the same results with less memory"

offloaded = partial(check, source="torch.autograd.graph.save_on_cpu", comparison=LOCKSTEP, mode=OFFLOADED_ACTIVATIONS,
                    needs={"activation_checkpointing"})  # fmt: skip

RECOMPUTATION: tuple[Check, ...] = (
    *(check(f"activation_checkpointing.{name}", meaning, _recomputing(models, reentrant=reentrant, outside=outside),
            source=source, comparison=LOCKSTEP) for name, meaning, models, reentrant, outside, source in (
        ("inside_units", "Units whose modules recompute give the bits of a plain run.", "mlp embedding", False, False, _SAME),
        ("around_units", "Recomputing whole units, gathered again in backward, gives the bits of a plain run.",
         "mlp", False, True, _SAME),
        ("reentrant_inside", "Reentrant recomputation inside units gives the bits of a plain run.",
         "mlp embedding", True, False, "pytorch PR 89791"),
        ("reentrant_around", "Reentrant recomputation around units gives the bits of a plain run.",
         "mlp", True, True, "pytorch PR 89781, 87413; fairscale PR 780"),
    )),
    check("activation_checkpointing.dropout", "The second forward drops the elements that the first has dropped.",
          *(cases("dropped_out", *iterations(2), wrapping=recomputed("dropped_out", outside=outside), optimizer=PLAIN_SGD)
            for outside in (False, True)), source="torch.utils.checkpoint, preserve_rng_state"),
    check("activation_checkpointing.of_inputs", "Inputs of a module that recomputes get their gradients.",
          *(cases(model, UnusualBackward(Batch(0), "of_inputs"), Observe(), wrapping=recomputed(model, outside=outside))
            for model in ("mlp", "keywords") for outside in (False, True)), source="torch.autograd.backward"),
    check("activation_checkpointing.nested",
          "Recomputation inside recomputation, or of a part of a unit, trains as in one process.",
          *(cases("deep_nest", *iterations(2), wrapping=plan) for plan in (
              recomputed("deep_nest"), WrappingPlan(("inner",), checkpointed=("inner.inner",)))),
          source=_SAME, needs={"nested_wrapping"}),
    check("activation_checkpointing.recomputed", "What is to be recomputed runs again in backward.",
          *(cases("mlp", *iteration(0), wrapping=recomputed("mlp", outside=outside)) for outside in (False, True)),
          source="torch.utils.checkpoint", mode=RECOMPUTES),
    check("activation_checkpointing.accumulated", "Recomputed micro-batches inside and outside no_sync add up, each once.",
          *(cases("mlp", *accumulated(0, 1, 2), Observe(), Step(), ZeroGrad(), *iteration(3),
                  wrapping=recomputed("mlp", outside=outside), optimizer=PLAIN_SGD) for outside in (False, True)),
          source="pytorch PR 90546"),
    check("activation_checkpointing.called_twice", "A module that recomputes runs twice, with a unit inside, as in one process.",
          cases("block_twice", *iterations(2), wrapping=every_unit("block_twice", checkpointed=("block",)), optimizer=PLAIN_SGD),
          source="torch.distributed.fsdp.fully_shard with nested units", needs={"nested_wrapping"}),
    check("activation_checkpointing.hidden",
          "A unit may recompute even if it returns a custom object or its stored tensor is used.",
          *(cases(model, *iterations(2), wrapping=recomputed(model)) for model in ("cached_intermediate", "opaque_output")),
          source="pytorch issue 173709", needs={"hidden_recomputation"}),
    # A forward without gradients never runs again, and must leave nothing for a later backward.
    check("activation_checkpointing.after_no_grad",
          "A forward without gradients between recomputed iterations changes nothing.",
          cases("mlp", *iteration(0), forward(5, "no_grad"), micro_batch(1), Step(), wrapping=recomputed("mlp")),
          source="pytorch PR 110139"),
    check("activation_checkpointing.evaluated",
          "A forward under no_grad between forward and backward changes nothing of what runs again.",
          cases("mlp", UnusualBackward(Batch(0), "evaluated"), Observe(), Step(), ZeroGrad(), *iteration(1),
                wrapping=recomputed("mlp")), source=_SAME),
    check("activation_checkpointing.mixed_precision", "The second forward casts as the first did.",
          *(cases("mlp", *iterations(2), micro_batch(2), dtype="float32", optimizer=ADAMW,
                  precision=MixedPrecisionSpec("bfloat16", "float32"), wrapping=recomputed("mlp", outside=outside))
            for outside in (False, True)),
          source="pytorch PR 90660", comparison=LOCKSTEP),
    offloaded("activation_checkpointing.offloaded", "Copies of what autograd saves give the bits of a plain run.",
              cases("mlp tied_within deep_nest batch_norm", *iterations(2), *accumulated(2, 3), Step(), ZeroGrad(),
                    forward(9, "no_grad"), micro_batch(4), optimizer=ADAMW), sizes=ODD),
    offloaded("activation_checkpointing.offloaded_in_low_precision",
              "Copies of what autograd saves in low precision give the bits of a plain run.",
              cases("mlp tied_within deep_nest", *iterations(2), micro_batch(2), dtype="float32", optimizer=ADAMW,
                    precision=MixedPrecisionSpec("bfloat16", "float32"))),
)  # fmt: skip
"""A forward that runs again in backward changes no number, whichever way it is done."""

_USED, _UNUSED = ((True, True, True),), ((False, False, False),)

PREFETCH: tuple[Check, ...] = (
    check("prefetch.every_kind", "Prefetching units, in forward and in backward, changes no number.",
          *(cases("mlp", *iterations(2), wrapping=every_unit("mlp", backward_prefetch=backward, forward_prefetch=ahead))
            for backward, ahead in (("pre", True), ("post", False), ("none", False))),
          source="PyTorch FSDP, VLDB 2023, section 3.3.2: prefetching"),
    # What was prefetched by the order of the last iteration may not be wanted in this one.
    check("prefetch.order_changes", "A unit that is prefetched and then skipped is not stale later.",
          cases("conditional", *iteration(0, usage=_USED), *iteration(1, usage=_UNUSED), forward(2, "no_grad", usage=_UNUSED),
                micro_batch(3, usage=_USED), Observe(), Step(),
                wrapping=every_unit("conditional", forward_prefetch=True), optimizer=PLAIN_SGD),
          source="pytorch PR 110139", comparison=Comparison(none_is_zero=True)),
    *(check(f"prefetch.skipped_by_{last}", f"A unit that the last {words} skips is gathered again after the step.",
            cases("conditional", *iteration(0, usage=_USED), micro_batch(1, usage=_USED), skips, Observe(),
                  Step(), ZeroGrad(), *iteration(3, usage=_USED),
                  wrapping=every_unit("conditional", forward_prefetch=True), optimizer=PLAIN_SGD),
            source="pytorch PR 110139", needs=needs)
      for last, words, skips, needs in (
        ("forward", "forward before a step", forward(2, "no_grad", usage=_UNUSED), ()),
        ("micro_batch", "micro-batch", micro_batch(2, usage=_UNUSED), {"accumulate_without_no_sync"}),
    )),
    check("prefetch.called_twice", "A unit that is prefetched a second time, and runs once, is gathered again after the step.",
          cases("called_twice", micro_batch(0), forward(1, "no_grad"), Step(), forward(2, "no_grad"), ZeroGrad(), *iteration(3),
                wrapping=every_unit("called_twice", forward_prefetch=True)),
          source="torch.distributed.fsdp.FSDPModule.set_modules_to_forward_prefetch"),
    check("prefetch.accumulated", "Prefetching in micro-batches inside and outside no_sync changes no number.",
          cases("deep_nest", *accumulated(0, 1, 2), Step(), ZeroGrad(), *iteration(3),
                wrapping=every_unit("deep_nest", forward_prefetch=True, backward_prefetch="post")),
          source="pytorch PR 84085"),
)  # fmt: skip
"""When a unit is gathered is no matter to the numbers."""

_PROGRAM = (*accumulated(0, 1), Observe(), Step(), ZeroGrad(), *iteration(2), forward(3))

_TWO_RANKS_SHARD = {4: ((2, 2),), 2: ((1, 2),)}
in_hybrid = partial(check, needs={"hybrid"}, strategies=HYBRID, meshes={4: ((2, 2),), 2: ((2, 1),)}, sizes=TWO_BY_TWO)


def _set(setting: str) -> WrappingPlan:
    return every_unit("mlp", settings=(setting,))


def _saved_over_mesh(form: str) -> tuple[Case, ...]:
    wrapping = every_unit("uneven", settings=("mesh_for_group",))
    return cases("uneven", *iteration(0), Reload(form), *iteration(1), optimizer=ADAMW, wrapping=wrapping)


SETTINGS: tuple[Check, ...] = (
    *(check(f"options.{name}", meaning, cases("mlp", *_PROGRAM, wrapping=_set(name), optimizer=PLAIN_SGD),
            source="what the documentation of the option says", needs={"accumulate_without_no_sync"})
      for name, meaning in (
        ("static_graph",
         "With a promised static graph gradients are reduced as usual, after local micro-batches too."),
        ("gradient_views", "Gradients that are views of buckets add up like any others."),
        ("small_buckets", "The number of gradients in a message changes no result."),
        ("batched_copies", "Gradients that are copied into a message together are divided once."),
        ("sum_reduction", "Summing and then dividing gives the mean."),
        ("kept_after_backward", "Parameters that stay whole between micro-batches are updated after the step."),
        ("tuned_communication", "Groups, buffers and memory of one's own for messages change no number."),
        ("unit_strategies", "Units that free their parameters after forward train beside units that keep them."),
        ("last_dimension", "Shards of the last dimension are concatenated along it."),
        ("default_device", "If no device is named, a model trains on its current device."),
    )),
    check("options.forward_methods", "A unit's registered methods compute and train as its forward does.",
          cases("methods", *iteration(0), forward(1, "eval"), *accumulated(2, 3), Observe(), Step(), ZeroGrad(), *iteration(4),
                optimizer=ADAMW),
          source="torch.distributed.fsdp.register_fsdp_forward_method"),
    check("options.named_axes", "Parameters that are DTensors on a mesh with named axes train as plain ones do.",
          cases("mlp", *_PROGRAM, wrapping=_set("named_axes"), optimizer=PLAIN_SGD),
          cases("mlp", *iteration(0), Reload(), *iteration(1), wrapping=_set("named_axes"), optimizer=ADAMW),
          *(cases(model, *iteration(0), Reload("sharded"), *iteration(1), wrapping=every_unit(model, settings=("named_axes",)),
                  dtype="float32", precision=MixedPrecisionSpec("bfloat16", "float32")) for model in ("uneven", "tied_within")),
          source="pytorch PR 176334", needs={"accumulate_without_no_sync", "mixed_precision", "optim_state"},
          comparison=LOCKSTEP),
    in_hybrid("options.named_axes_in_hybrid", "The axes that replicate parameters and that shard them are told apart by name.",
              cases("mlp", *_PROGRAM, wrapping=_set("named_axes"), optimizer=PLAIN_SGD),
              source="pytorch PR 176334"),
    check("options.flattened_axes", "Parameters sharded over two axes train as over one axis of the same ranks.",
          cases("mlp", *_PROGRAM, wrapping=_set("flattened_axes"), optimizer=PLAIN_SGD),
          cases("uneven", *iteration(0), Reload("sharded"), *iteration(1), optimizer=ADAMW,
                wrapping=every_unit("uneven", settings=("flattened_axes",))),
          source="pytorch PR 176334", needs={"accumulate_without_no_sync", "optim_state"}, sizes=(4,)),
    check("options.grouped_units",
          "Two modules that are one unit train as each by itself does, also where only one of them runs.",
          cases("mlp", *_PROGRAM, wrapping=_set("grouped_units"), optimizer=PLAIN_SGD),
          cases("conditional", *(operation for batch, usage in enumerate(((True, False, True), (False, True, False)) * 2)
                                 for operation in iteration(batch, Observe(), usage=(usage,))),
                wrapping=every_unit("conditional", settings=("grouped_units",)), optimizer=PLAIN_SGD),
          source="torch.distributed.fsdp.fully_shard", needs={"accumulate_without_no_sync"},
          comparison=Comparison(none_is_zero=True)),
    # Over half of the ranks, which are fewer than all and more than one on four ranks alone.
    check("options.partial_reshard",
          "Parameters that stay sharded over fewer ranks after forward are gathered for backward.",
          cases("mlp", *_PROGRAM, wrapping=_set("partial_reshard"), optimizer=PLAIN_SGD),
          source="torch.distributed.fsdp.fully_shard", needs={"accumulate_without_no_sync"}, sizes=(4,)),
    check("options.shared_streams", "Several models that share their streams train one after another in one forward.",
          *(cases(model, *before, *_PROGRAM, optimizer=PLAIN_SGD, wrapping=every_unit(model, settings=("shared_streams",)))
            for model in ("mlp", "deep_nest") for before in ((), (forward(9),))),
          source="torch.distributed.fsdp.share_comm_ctx", needs={"accumulate_without_no_sync"}),
    # What an inner unit reduced in `no_sync`, since the root alone is local, is cleared with the other gradients.
    check("options.single_units", "Switches of a unit, set one by one and between passes, are its own and change no number.",
          *(cases(model, *_PROGRAM, wrapping=every_unit(model, settings=("single_units", *also)), optimizer=PLAIN_SGD)
            for model in ("deep_nest", "embedding") for also in ((), ("kept_after_backward",))),
          cases("mlp", no_sync_batch(0), ZeroGrad(), micro_batch(1), Observe(), wrapping=_set("single_units")),
          source="torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync, recurse",
          needs={"accumulate_without_no_sync", "nested_wrapping"}),
    check("options.divide_factor", "Gradients are divided by the given number, in every dtype.",
          *(cases("mlp", micro_batch(0), Observe(), ZeroGrad(), *accumulated(1, 2), Observe(),
                  wrapping=_set("divide_factor"), dtype=dtype) for dtype in ("float64", "float32")),
          source="pytorch issue 155903", mode=scaled(0.5), sizes=ODD),
    in_hybrid("options.default_groups", "Groups of hybrid sharding that the implementation chooses average over all ranks.",
              cases("mlp", micro_batch(0), Observe(), Step(), optimizer=PLAIN_SGD,
                    wrapping=WrappingPlan(policy=PolicySpec("always"), settings=("default_groups",))),
              source="pytorch issue 154888"),
    check("options.unused_left_out", "Parameters that no rank uses get no gradient, and the others train as before.",
          *(cases("conditional", *(operation for batch in range(3) for operation in iteration(batch, Observe(), usage=used)),
                  forward(3, usage=used), wrapping=every_unit("conditional", settings=("unused_left_out", *also)),
                  optimizer=PLAIN_SGD)
            for used in (((True, False, True),), ((False, True, False),)) for also in ((), ("gradient_views",))),
          source="torch.nn.parallel.DistributedDataParallel, skip_all_reduce_unused_params",
          needs={"unused_parameters", "gradient_views"}),
    check("options.mesh_for_group", "A model whose ranks are given as a mesh trains as with their group.",
          cases("mlp", *_PROGRAM, wrapping=_set("mesh_for_group"), optimizer=PLAIN_SGD), _saved_over_mesh("full"),
          source="torch.distributed.fsdp.FullyShardedDataParallel, device_mesh",
          needs={"accumulate_without_no_sync"}, sizes=ODD),
    check("options.mesh_for_group_in_shards", "A model whose ranks are given as a mesh is saved in shards and loaded.",
          _saved_over_mesh("sharded"), source="torch.distributed.fsdp.FullyShardedDataParallel, device_mesh", sizes=ODD),
    check("options.mesh_for_group_of_another_rank", "Shards that another rank saved over a mesh are refused.",
          cases("mlp", *iteration(0), Observe(OF_ANOTHER_RANK["sharded"]), wrapping=_set("mesh_for_group")),
          source="torch.nn.Module.load_state_dict", needs={"sharded_state_dict", "strict_state"}, strategies=("full_shard",),
          mode=REFUSED, sizes=ODD),
    in_hybrid("options.mesh_for_group_in_hybrid", "Hybrid sharding over two groups in place of a mesh averages over all ranks.",
              cases("mlp", *_PROGRAM, wrapping=_set("mesh_for_group"), optimizer=PLAIN_SGD),
              source="torch.distributed.fsdp.FullyShardedDataParallel, process_group", meshes=_TWO_RANKS_SHARD),
    in_hybrid("options.mesh_for_group_in_hybrid_shards", "Hybrid sharding over two groups saves and loads state in shards.",
              _saved_over_mesh("sharded"),
              source="torch.distributed.fsdp.FullyShardedDataParallel, process_group", meshes=_TWO_RANKS_SHARD),
    check("options.own_state",
          "Training continues from a state of model and optimizer that the implementation's own methods saved.",
          cases("mlp", *iteration(0), Reload(), *iteration(1), wrapping=_set("own_state"), optimizer=ADAMW),
          source="torch.distributed.fsdp.FullyShardedDataParallel.optim_state_dict"),
    check("options.own_state_of_versions", "Modules convert states of an older version of theirs, and those alone.",
          cases("versioned", *iteration(0), wrapping=every_unit("versioned", settings=("own_state",)), optimizer=PLAIN_SGD),
          source="torch.nn.Module.load_state_dict", needs={"full_state_dict", "module_versions"}, mode=KEEPS_VERSIONS),
    # One unit, of which the optimizer has a part; it would clear the gradients of its own parameters only. With flat
    # parameters the first one is not that of the model.
    check("options.own_state_of_a_part", "An optimizer over some of the parameters can be saved and loaded.",
          cases("mlp", micro_batch(0), Step(), Reload(), micro_batch(1), Step(), wrapping=WrappingPlan(settings=("own_state",))),
          source="pytorch PR 76671", needs={"own_state", "frozen_mixed_unit"}, mode=PARTLY_OPTIMIZED),
    check("options.offloaded_state", "Parameters that are gathered on the CPU can be edited and saved.",
          *(cases("mlp", *iteration(0), access, *iteration(1), wrapping=_set("offloaded_state"), optimizer=PLAIN_SGD)
            for access in (EditFullParameters(("*",), 0.5, writeback=False), Reload(optimizer=False))),
          source="pytorch issue 188989"),
    check("options.saved_on_rank_0", "Training continues from a state of model and optimizer that rank 0 alone saved.",
          *(cases(model, *iteration(0), Reload(), *iteration(1), wrapping=every_unit(model, settings=("saved_on_rank_0",)),
                  optimizer=ADAMW) for model in ("uneven", "two_dtypes")),
          source="torch.distributed.fsdp.FullOptimStateDictConfig, rank0_only",
          needs={"full_state_dict", "optim_state"}, sizes=ODD),
    check("options.rank_0_state", "State that rank 0 alone has is loaded by every rank.",
          *(cases(model, *iteration(0), Reload(optimizer=model == "uneven"), *iteration(1),
                  wrapping=every_unit(model, settings=("rank_0_state",)), optimizer=ADAMW)
            for model in ("uneven", "buffers")),
          source="torch.distributed.checkpoint.state_dict.StateDictOptions, broadcast_from_rank0",
          needs={"full_state_dict", "optim_state"}, sizes=ODD),
    check("options.rank_0_state_unfit", "State of rank 0 that does not fit the model is refused by every rank.",
          *(cases("mlp", *iteration(0), Reload(optimizer=False), Observe(wrong),
                  wrapping=every_unit("mlp", settings=("rank_0_state",))) for wrong in WRONG_STATES),
          source="torch.distributed.checkpoint.state_dict.StateDictOptions, broadcast_from_rank0",
          needs={"full_state_dict"}, mode=REFUSED, sizes=ODD),
    check("options.assigned_state", "Tensors of a state in shards that become the parameters are those that are trained.",
          *(cases(model, *before, Reload("sharded", optimizer=False), Observe(), *iteration(1), forward(2),
                  wrapping=every_unit(model, settings=("assigned_state",)), optimizer=PLAIN_SGD)
            for model in ("mlp", "uneven") for before in ((), iteration(0))),
          source="torch.nn.Module.load_state_dict, assign", sizes=ODD),
    in_hybrid("options.own_all_reduce", "What a user's function averages over replicas is the mean over all ranks.",
              cases("mlp uneven", *accumulated(0, 1), Observe(), Step(), ZeroGrad(), *iteration(2), forward(3),
                    wrapping=_set("own_all_reduce"), optimizer=PLAIN_SGD),
              source="torch.distributed.fsdp.FSDPModule.set_all_reduce_hook"),
    in_hybrid("options.late_all_reduce", "Micro-batches that are reduced over the replicas by a later one count once.",
              cases("mlp", *accumulated(0, 1, 2), Observe(), Step(), ZeroGrad(), *iteration(3), forward(4),
                    wrapping=_set("late_all_reduce"), optimizer=PLAIN_SGD),
              source="torch.distributed.fsdp.FSDPModule.set_requires_all_reduce"),
    in_hybrid("options.late_all_reduce_cleared", "Gradients that are cleared while they await reduction over "
        "replicas leave no trace.",
              cases("mlp", no_sync_batch(0), ZeroGrad(), micro_batch(1), Observe(), Step(),
                    wrapping=_set("late_all_reduce"), optimizer=PLAIN_SGD),
              source="torch.optim.Optimizer.zero_grad"),
    in_hybrid("options.late_all_reduce_failed", "Gradients that await reduction over replicas leave no trace after a failure.",
              cases("mlp", no_sync_batch(0), Interrupt(Batch(9)), micro_batch(1), Observe(), Step(),
                    wrapping=_set("late_all_reduce"), optimizer=PLAIN_SGD),
              source="torch.distributed.fsdp.FSDPModule.reset_iter_state"),
)  # fmt: skip
"""With each of them training is what it is without."""

hooked = partial(
    check, needs={"comm_hook"}, source="torch.distributed.fsdp.FullyShardedDataParallel.register_comm_hook"
)

COMM_HOOKS: tuple[Check, ...] = (
    # No step: gradients are a function of the initial values, so the rank's own are known without the other ranks.
    hooked("comm_hook.called_once_per_unit",
           "Each backward calls the hook once for every unit, with the unit's whole gradient on this rank.",
           cases("uneven deep_nest", micro_batch(0), ZeroGrad(), micro_batch(1), Observe(), optimizer=PLAIN_SGD),
           mode=REVIEWED),
    hooked("comm_hook.not_in_no_sync",
           "Inside no_sync the hook is not called; the next reduction receives the sum of all micro-batches.",
           cases("mlp", *accumulated(0, 1, 2), Observe(), ZeroGrad(), micro_batch(3), optimizer=PLAIN_SGD),
           cases("deep_nest", *accumulated(0, 1), Observe(), optimizer=PLAIN_SGD), mode=REVIEWED),
    hooked("comm_hook.averages", "Training with an averaging hook equals training without a hook.",
           cases("uneven", *iterations(3)), mode=AVERAGING, sizes=ODD),
    hooked("comm_hook.result_is_kept", "The hook's result is the gradient: nothing else is reduced, divided or added.",
           cases("uneven", *iterations(3)), mode=QUARTERING),
    *(hooked(f"comm_hook.{wire}", f"A hook that reduces in {wire} gives the same as reduction in {wire}.",
             cases("uneven", *iteration(0, Observe()), micro_batch(1), dtype="float32", optimizer=PLAIN_SGD),
             comparison=LOCKSTEP, mode=compressed_to(wire)) for wire in ("bfloat16", "float16")),
    *(check(f"comm_hook.shipped_{wire}", f"The implementation's own hook that compresses to {wire} reduces in {wire}.",
            *(cases(model, *iteration(0, Observe()), *accumulated(1, 2), Observe(), Step(), dtype=dtype, optimizer=PLAIN_SGD,
                    precision=MixedPrecisionSpec(reduce_dtype=wire), wrapping=every_unit(model, settings=("compressing_hook",)))
              for model, dtype in (("uneven", "float32"), ("mlp", "float64"))),
            source="torch.distributed.algorithms", comparison=LOCKSTEP, sizes=ODD) for wire in ("bfloat16", "float16")),
)  # fmt: skip
"""The user's own function reduces gradients, and is called when and with what it must be."""

CHECKS = (*RECOMPUTATION, *PREFETCH, *SETTINGS, *COMM_HOOKS)
