"""Parameters and buffers: parameters that are unused, frozen, shared or of odd sizes; buffers, which each rank has its own."""

from __future__ import annotations

from functools import partial

from fsdp_testing.cases.operations import Restore, Save
from fsdp_testing.cases.records import (
    Case,
    Clip,
    EditFullParameters,
    Freeze,
    MixedPrecisionSpec,
    Observe,
    Operation,
    Reload,
    Step,
    Thaw,
    WrappingPlan,
    ZeroGrad,
)
from fsdp_testing.checks.suites.check import (
    ADAMW,
    LOCKSTEP,
    ODD,
    PLAIN_SGD,
    Check,
    accumulated,
    cases,
    check,
    every_unit,
    forward,
    iteration,
    iterations,
    micro_batch,
    micro_batches,
    no_sync_batch,
)
from fsdp_testing.oracle.quantities import Comparison

# For plain SGD None and zeros are the same; another check tells them apart. A parameter frozen inside a unit that trains may
# get zeros where one process leaves None.
lenient = partial(check, comparison=Comparison(none_is_zero=True))
differing = partial(lenient, source="torch.nn.parallel.DistributedDataParallel, find_unused_parameters")

_ALL, _FIRST, _NONE = (True, True, True), (True, False, False), (False, False, False)
_SWAPPED = ((True, False), (False, True))


def _using(*usages: tuple[tuple[bool, ...], ...]) -> list[Operation]:
    """Return an iteration for each usage: one mask for all ranks, or one per rank."""
    return [op for seed, usage in enumerate(usages) for op in iteration(seed, usage=usage)]


UNUSED: tuple[Check, ...] = (
    lenient("unused.never", "Parameters that no iteration uses do not move, and the others train.",
            cases("conditional", *iterations(2, usage=(_ALL,)), optimizer=PLAIN_SGD),
            cases("unused_output", *iterations(2), optimizer=PLAIN_SGD),
            source="pytorch issue 83107, PR 83195"),
    lenient("unused.sometimes", "Parameters used only in some iterations get a gradient only in those.",
            cases("conditional", *_using((_ALL,), (_FIRST,), (_NONE,), (_ALL,)), optimizer=PLAIN_SGD),
            cases("partly_used", *_using(((True, False),), ((False, True),), ((False, False),), ((True, True),)),
                  optimizer=PLAIN_SGD),
            source="pytorch issue 83129, PR 80245"),
    lenient("unused.in_accumulation", "A parameter that only a local micro-batch used is reduced with the others.",
            cases("conditional", no_sync_batch(0, usage=(_ALL,)), no_sync_batch(1, usage=(_FIRST,)),
                  *iteration(2, Observe(), usage=(_NONE,)), *iteration(3, usage=(_ALL,)), optimizer=PLAIN_SGD),
            cases("partly_used", no_sync_batch(0, usage=((True, False),)), micro_batch(1, usage=((False, True),)),
                  Step(), ZeroGrad(False), *iteration(2, usage=((False, False),)), optimizer=PLAIN_SGD),
            source="pytorch issue 69031, PR 124193"),
    differing("unused.units_differ_between_ranks", "Ranks may run different units: a rank that skips a unit counts "
        "as zeros.",
              cases("conditional", *_using((_ALL, _FIRST), (_FIRST, _NONE), (_NONE, _ALL)), optimizer=PLAIN_SGD), sizes=ODD),
    differing("unused.parameters_differ_between_ranks",
              "Inside a unit that every rank runs, ranks may use different parameters.",
              cases("partly_used", *_using(_SWAPPED, ((True, True), (False, False))), optimizer=PLAIN_SGD),
              sizes=ODD),
    differing("unused.units_swapped_between_ranks",
              "Ranks may run different units of equal size: neither gets the other's gradient.",
              cases("conditional", *_using(*[((True, False, False), (False, True, False))] * 2), optimizer=PLAIN_SGD)),
    differing("unused.parameters_swapped_between_ranks",
              "Ranks may use different parameters of equal size in one unit: neither gets the other's gradient.",
              cases("partly_used", *_using(_SWAPPED, _SWAPPED), optimizer=PLAIN_SGD, wrapping=WrappingPlan())),
    differing("unused.zeros_are_sent",
              "If zeros stand for what a rank leaves out, ranks may use different parameters of a unit.",
              *(cases("partly_used", *_using(_SWAPPED, ((True, True), (False, False))), no_sync_batch(2, usage=_SWAPPED),
                      *iteration(3, Observe(), usage=((False, False),)), dtype=dtype, precision=precision,
                      wrapping=every_unit("partly_used", settings=("zeros_for_unused",)), optimizer=PLAIN_SGD)
                for dtype, precision in (("float64", None), ("float32", MixedPrecisionSpec("bfloat16", "float32")))),
              source="torch.distributed.fsdp.FSDPModule.set_reduce_scatter_unused_params", sizes=ODD,
              comparison=Comparison(none_is_zero=True, lockstep=True)),
    check("unused.gradient_is_none",
          "A parameter that no rank used keeps gradient None: weight decay and momentum leave it alone.",
          cases("conditional", *_using((_ALL,), (_FIRST,), (_NONE,), (_ALL,)), optimizer=ADAMW),
          cases("partly_used", *_using(((True, False),), ((False, False),), ((True, True),)), optimizer=ADAMW),
          source="torch.nn.parallel.DistributedDataParallel, find_unused_parameters", needs={"unused_gradient_is_none"}),
    check("unused.none_in_accumulation", "A parameter that no micro-batch of an accumulation used keeps gradient None.",
          *(cases(model, *iteration(0, usage=(all_used,)), no_sync_batch(1, usage=(some,)),
                  *iteration(2, Observe(), usage=(some,)), *iteration(3, usage=(all_used,)), optimizer=ADAMW)
            for model, all_used, some in (("conditional", _ALL, _FIRST), ("partly_used", (True, True), (True, False)))),
          source="torch.nn.parallel.DistributedDataParallel, find_unused_parameters", needs={"unused_gradient_is_none"}),
)  # fmt: skip
"""Parameters that an iteration does not use: on no rank, on some ranks, in some iterations."""

_HEAD, _BODY, _TAIL = ("layers.0.*",), ("layers.1.*",), ("layers.2.*",)

FROZEN: tuple[Check, ...] = (
    check("frozen.unit_in_the_middle", "A frozen unit passes gradients on, gets none, and does not move.",
          cases("frozen_body", *iterations(3), optimizer=ADAMW), source="pytorch PR 101982, 110948"),
    check("frozen.schedule", "A frozen unit stays right in a schedule of local micro-batches and forward passes.",
          cases("frozen_body", *accumulated(0, 1), Step(), ZeroGrad(), forward(2), *iteration(3)),
          source="pytorch PR 101982"),
    check("frozen.units_at_the_start", "Frozen first units end the backward pass early, without errors.",
          cases("frozen_stem", *iterations(3), optimizer=ADAMW), cases("mlp", *iterations(3), freeze=_HEAD + _BODY),
          source="pytorch issue 117510"),
    check("frozen.inside_a_unit", "A unit may mix frozen and trainable parameters; frozen ones get no gradient.",
          cases("frozen_bias", *iterations(3), optimizer=ADAMW),
          cases("frozen_bias", *micro_batches(0, 1), Observe(), Step()),
          source="pytorch PR 101982"),
    check("frozen.weights_alone", "Units whose biases alone train compute with stepped biases, after forwards between, too.",
          cases("mlp uneven", micro_batch(0), forward(5, "no_grad"), Step(), forward(6, "no_grad"), ZeroGrad(), *iteration(1),
                forward(7, "eval"), freeze=("*.weight",), optimizer=PLAIN_SGD),
          source="pytorch PR 101982", needs={"frozen_mixed_unit"}),
    *(check(f"frozen.{name}_{after}", f"A frozen unit that is {name} after a forward {does}.",
            *(cases("mlp", *before, forward(5, "no_grad"), changes, forward(6, "no_grad"), *iteration(2), optimizer=PLAIN_SGD,
                    freeze=frozen, dtype=dtype, precision=precision) for frozen in (_HEAD, _BODY)),
            source="torch.nn.Parameter.requires_grad", needs=needs, comparison=comparison)
      for name, before, changes, needs in (
        ("edited", iteration(0), EditFullParameters(("*",), 0.5), set()),
        ("loaded", (*iteration(0), Save(), EditFullParameters(("*",), 0.5)), Restore(), {"full_state_dict"}))
      for after, does, dtype, precision, comparison in (
        ("after_forward", "computes with its new values", "float64", None, Comparison()),
        ("in_low_precision", "casts its new values", "float32", MixedPrecisionSpec("bfloat16"), LOCKSTEP))),
    check("frozen.everything", "A model without trainable parameters runs and does not move.",
          cases("mlp", *iterations(2), freeze=("*",)), source="pytorch PR 101982", needs={"all_parameters_frozen"}),
    check("frozen.thawed_later", "A unit frozen at construction and thawed later trains from then on.",
          *(cases("mlp", *iterations(2), Thaw(unit), *iterations(2, first=2), freeze=unit) for unit in (_BODY, _HEAD)),
          source="pytorch issue 104148, PR 104186"),
    lenient("frozen.frozen_later", "A unit frozen between iterations stops training, and continues when thawed.",
            cases("mlp", *iterations(2), Freeze(_BODY), *iterations(2, first=2), Thaw(_BODY), *iteration(4)),
            source="pytorch issue 104148"),
    lenient("frozen.toggled", "A unit is frozen and thawed alternately.",
            cases("mlp", Freeze(_HEAD), *iteration(0), Thaw(_HEAD), Freeze(_TAIL), *iteration(1), Thaw(("*",)), *iteration(2)),
            source="pytorch issue 186998"),
)  # fmt: skip
"""Frozen parameters, and parameters that are frozen or thawed while training."""


def _trained(*models: str, last: Operation) -> tuple[Case, ...]:
    cleared = (micro_batch(0), Observe(), Step(), ZeroGrad(False), micro_batch(1), last)
    return tuple(
        case for model in models for case in (*cases(model, *iterations(3), optimizer=ADAMW), *cases(model, *cleared))
    )


SHARED: tuple[Check, ...] = (
    *(check(f"shared.{name}", meaning, _trained(model, last=Step()), source=source) for name, meaning, model, source in (
        ("within_a_unit", "A parameter under two names gets the gradient of both uses and stays one parameter.",
         "tied_within", "pytorch PR 98912, 99448"),
        ("across_units", "A parameter used by two units gets the gradient of both and stays one parameter.",
         "tied_across", "pytorch issue 83052; torchtitan 2817"),
        ("module_called_twice", "A unit called twice in a forward gets the gradient of both calls.",
         "called_twice", "fairscale PR 784, 513"),
        ("called_without_gradient_too", "A unit that also runs under no_grad gets the gradient of its other call.",
         "self_conditioned", "torch.no_grad"),
        ("module_registered_twice", "A unit under two names is one unit.", "registered_twice", "pytorch PR 98912"),
    )),
    check("shared.accumulated", "Shared parameters and repeated units accumulate over micro-batches.",
          cases("tied_within called_twice", *accumulated(0, 1, 2), Observe(), Step()), source="pytorch PR 98912, 124193"),
)  # fmt: skip
"""Parameters under several names, and modules that are called more than once."""

BUFFERS: tuple[Check, ...] = (
    check("buffers.kept", "Saved and unsaved, floating, integer and boolean buffers keep value and dtype and are updated.",
          cases("buffers", Observe(), *iterations(3), forward(9, "eval")), source="pytorch PR 87935"),
    check("buffers.statistics", "Each rank's batch statistics come from its own inputs.",
          cases("batch_norm", *iterations(3), Observe()), source="torch.nn.BatchNorm1d"),
    check("buffers.in_no_sync", "Buffers are updated inside no_sync too.",
          cases("buffers batch_norm", *accumulated(0, 1), Observe()), source="pytorch PR 87935"),
)  # fmt: skip
"""Every rank's own, computed from its own inputs, neither sharded nor reduced nor lost."""

_UNEVEN = {"uneven_parameters"}

SIZES: tuple[Check, ...] = (
    *(check(f"sizes.{name}", meaning, _trained(*models, last=Observe()), source=source, needs=needs, sizes=ODD)
      for name, meaning, models, source, needs in (
        ("uneven", "Sizes that the number of ranks does not divide; padding is never visible.", ("uneven", "embedding"),
         "pytorch PR 88769; issue 176076", _UNEVEN),
        ("fewer_elements_than_ranks", "Parameters of one element: some ranks hold none of it.", ("one_element",),
         "pytorch PR 94109", _UNEVEN),
        ("zero_dim", "0-dimensional parameters train.", ("scalars",), "torch.nn.Parameter of shape ()", ()),
        ("empty", "Parameters without elements are kept.", ("empty_parameters",),
         "torch.nn.Linear with out_features=0", ()),
        ("strided", "Parameters that are not contiguous keep their elements in place.", ("strided",),
         "torch.channels_last", ()),
    )),
    check("sizes.wide", "Shards of more than 64 KiB.", cases("wide", *iterations(2), Observe()),
          source="torch.distributed.fsdp: chunked copies"),
    check("sizes.huge", "A parameter of more than 16 MiB.", cases("huge", *iteration(0), dtype="float32", optimizer=PLAIN_SGD),
          source="torch.nn.parallel.DistributedDataParallel, bucket_cap_mb"),
    check("sizes.two_dtypes", "A unit may hold parameters of two dtypes.",
          *(cases("two_dtypes", *iterations(2), micro_batch(2), Observe(), Step(), wrapping=plan)
            for plan in (None, WrappingPlan())),
          source="pytorch issue 154082", needs={"mixed_dtype_units"}, sizes=ODD),
    check("sizes.two_dtypes_in_lockstep", "A gradient is reduced in its own dtype, whatever others of the unit have.",
          *(cases("two_dtypes", *iteration(0), *accumulated(1, 2), Observe(), Step(), wrapping=plan, arguments=arguments)
            for plan, arguments in ((None, {}), (WrappingPlan(), {}), (WrappingPlan(), {"narrow_first": True}))),
          source="pytorch issue 154082", needs={"mixed_dtype_units"}, comparison=LOCKSTEP),
    *(check(f"sizes.integers{of}", f"Parameters of whole numbers stay as they are{what}, and others train beside them.",
            cases("quantized", *iterations(2), forward(5), Reload(form), *iteration(2), **options),
            source="quantized weights: bitsandbytes, torchao", comparison=comparison, sizes=ODD)
      for of, what, form, comparison, options in (
        ("", "", "full", Comparison(), {"optimizer": ADAMW}),
        ("_in_shards", ", saved in shards, too", "sharded", Comparison(), {"optimizer": ADAMW}),
        ("_in_low_precision", " in low precision", "full", LOCKSTEP,
         {"dtype": "float32", "precision": MixedPrecisionSpec("bfloat16")}),
    )),
    *(check(f"sizes.zero_dim_{form}", f"0-dimensional parameters are edited, and loaded with their moments in {form} form.",
            cases("scalars", *iterations(2), Reload(form), Observe(), EditFullParameters(("*",), 0.5), Observe(), *iteration(2),
                  optimizer=ADAMW),
            source="torch.nn.Parameter of shape ()") for form in ("full", "sharded")),
    check("sizes.clipped_and_accumulated", "Padding does not count in norms or accumulation.",
          cases("uneven one_element", *accumulated(0, 1), Clip(0.1), Step(), dtype="float32"),
          source="pytorch PR 88769", needs=_UNEVEN, sizes=ODD),
)  # fmt: skip
"""Sizes that the number of ranks does not divide, fewer elements than ranks, 0-dim, empty, strided."""

CHECKS = (*UNUSED, *FROZEN, *SHARED, *BUFFERS, *SIZES)
