"""Arithmetic: casts of mixed precision, norms and clipping, gradients that are not finite, hooks on parameters.

In mixed precision at two ranks equality is bitwise: two summands commute and the division is exact. With more ranks a sum
may be formed in any order: the bound is (N-1) x u x sum |g_r| with u the unit roundoff of the reduction's dtype.
"""

from __future__ import annotations

import math
from functools import partial

from fsdp_testing.cases.operations import EditGradients, LocalMicroBatches, UnusualBackward
from fsdp_testing.cases.records import (
    AssignData,
    Batch,
    Case,
    Clip,
    EditFullParameters,
    Freeze,
    MixedPrecisionSpec,
    Observe,
    PolicySpec,
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
    UP_TO_EIGHT,
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
from fsdp_testing.checks.suites.hooks import (
    ADDED_IN_BACKWARD,
    AFTER_ACCUMULATION,
    EARLY,
    EARLY_AFTER_ACCUMULATION,
    OWN_GRADIENT,
    STEPS_IN_BACKWARD,
    ZEROED,
)
from fsdp_testing.checks.suites.one_pass import ONE_INPUT_BUFFER
from fsdp_testing.checks.suites.programs import poisoned
from fsdp_testing.oracle.quantities import Comparison

_LOW, _BOTH = MixedPrecisionSpec("bfloat16"), MixedPrecisionSpec("bfloat16", "float32")

lowered = partial(check, comparison=LOCKSTEP)
stored_in_float32 = partial(cases, dtype="float32")
stored_in_bfloat16 = partial(cases, dtype="bfloat16")

MIXED_PRECISION: tuple[Check, ...] = (
    *(lowered(f"mixed_precision.{name}", meaning,
              stored_in_float32("mlp uneven", *iterations(2), micro_batch(2), optimizer=ADAMW, precision=precision),
              source="pytorch PR 90660, 90657", sizes=ODD) for name, meaning, precision in (
        ("param_bfloat16", "Computes in bfloat16, reduces in bfloat16, stores and steps in float32.", _LOW),
        ("param_float16", "Computes and reduces in float16.", MixedPrecisionSpec("float16")),
        ("reduce_float32", "Computes in bfloat16 and reduces in float32.", _BOTH),
        ("reduce_bfloat16", "Computes in float32 and reduces in bfloat16.", MixedPrecisionSpec(None, "bfloat16")),
    )),
    lowered("mixed_precision.same_dtype", "Asking for the dtype that parameters already have changes nothing.",
            stored_in_float32("mlp", *iterations(2), precision=MixedPrecisionSpec("float32")), source="pytorch PR 90660"),
    lowered("mixed_precision.accumulated", "Local and reduced micro-batches add up in the right dtypes.",
            *(stored_in_float32("mlp", *accumulated(0, 1), Observe(), Step(), ZeroGrad(), *micro_batches(2, 3),
                                optimizer=PLAIN_SGD, precision=precision) for precision in (_BOTH, _LOW)),
            source="pytorch PR 91193", needs={"accumulate_without_no_sync"}),
    # The sum of seventeen 8-bit numbers fits into 24 bits, but not into 8.
    lowered("mixed_precision.local_sums",
            "Local micro-batches of a narrower dtype add up in the reduction dtype, in which their sum is exact.",
            stored_in_float32("mlp uneven", LocalMicroBatches(tuple(map(Batch, range(16)))), micro_batch(16), Observe(), Step(),
                              optimizer=PLAIN_SGD, precision=_BOTH),
            source="torch.distributed.fsdp.MixedPrecisionPolicy"),
    # The gradient of the first layer's weight is as small as its inputs: a few of float16's smallest steps. Each division loses
    # a part of it, so it matters which divisions come before the sum.
    lowered("mixed_precision.smallest_numbers",
            "Gradients near float16's smallest numbers are divided before or after the sum, as the implementation "
            "states.",
            *(stored_in_float32("mlp", micro_batch(0, scale=2.0**-power), Observe(), Step(), optimizer=PLAIN_SGD,
                                precision=MixedPrecisionSpec(None, "float16")) for power in (20, 21, 22)),
            source="pytorch issue 90784", sizes=UP_TO_EIGHT),
    # The largest gradient is 42,300: the sum of two exceeds 65,504, and that of three halves does not.
    lowered("mixed_precision.largest_numbers", "Gradients near float16's largest numbers do not overflow in their sum.",
            stored_in_float32("deep_nest", micro_batch(0, scale=10_813.0, alike=True), Observe(), Step(), optimizer=PLAIN_SGD,
                              precision=MixedPrecisionSpec(None, "float16")),
            source="torch.distributed.fsdp: gradients are divided in two steps", sizes=UP_TO_EIGHT),
    lowered("mixed_precision.evaluated", "Evaluation casts as training does.",
            stored_in_float32("mlp", *iteration(0), forward(5, "eval"), forward(6, "no_grad"), *iteration(1), forward(7, "eval"),
                              precision=_LOW),
            source="pytorch issue 103862"),
    lowered("mixed_precision.buffers", "Floating-point buffers are held in buffer_dtype, others keep their dtype.",
            *(stored_in_float32("buffers", *iterations(2), precision=precision) for precision in (
                _LOW, MixedPrecisionSpec(buffer_dtype="bfloat16"), MixedPrecisionSpec("bfloat16", "float32", "bfloat16"))),
            source="pytorch PR 87935; issue 143900"),
    lowered("mixed_precision.ignored_buffers", "Buffers of ignored modules keep their dtype.",
            stored_in_float32("buffers", *iterations(2), precision=MixedPrecisionSpec(buffer_dtype="bfloat16"),
                              wrapping=WrappingPlan(units=("second",), ignored=("first",)), freeze=("first.*",)),
            source="torch.distributed.fsdp.MixedPrecision", needs={"nested_wrapping"}),
    lowered("mixed_precision.outputs", "The root casts its outputs, and the loss is computed in full precision.",
            *(stored_in_float32(model, *iterations(2), forward(5, "eval"), optimizer=PLAIN_SGD, precision=precision,
                                wrapping=every_unit(model, settings=("full_outputs",)))
              for model in ("mlp", "containers") for precision in (_LOW, _BOTH)),
            source="torch.distributed.fsdp.MixedPrecisionPolicy, output_dtype"),
    lowered("mixed_precision.autocast", "Units that run under the user's autocast compute in bfloat16 and are stored as before.",
            stored_in_float32("autocast", *iterations(2), forward(5, "no_grad"), *accumulated(2, 3), Observe(), Step(),
                              optimizer=PLAIN_SGD),
            source="torch.autocast", needs={"no_sync", "forward_only"}),
    lowered("mixed_precision.of_units", "Each unit casts its inputs to its own dtype, in which it computes.",
            *(stored_in_float32(model, *iterations(2), micro_batch(2), optimizer=PLAIN_SGD, precision=precision,
                                wrapping=every_unit(model, settings=("unit_precisions",)))
              for model in ("mlp", "precise_input") for precision in (_LOW, _BOTH)),
            source="torch.distributed.fsdp.MixedPrecisionPolicy, cast_forward_inputs", needs={"nested_wrapping"}),
    lowered("mixed_precision.every_input", "The root casts every floating-point input, the second one too.",
            stored_in_float32("two_inputs", *iterations(2), forward(5, "eval"), optimizer=PLAIN_SGD, precision=_LOW),
            source="torch.distributed.fsdp.MixedPrecision, cast_root_forward_inputs"),
    lowered("mixed_precision.inputs_in_one_buffer", "Inputs that are copied into the same tensors are cast each time.",
            stored_in_float32("mlp two_inputs", forward(5, "no_grad"), forward(6, "no_grad"), *iterations(2), forward(7),
                              optimizer=PLAIN_SGD, precision=_LOW),
            source="torch.distributed.fsdp.MixedPrecision, cast_root_forward_inputs", mode=ONE_INPUT_BUFFER),
    *(lowered(f"mixed_precision.{name}", f"Parameters that {how} between iterations are cast anew.",
              stored_in_float32("mlp", *iteration(0), AssignData(("*",), 0.5, Batch(6), in_place=in_place),
                                *iteration(1), optimizer=PLAIN_SGD, precision=_LOW), source="pytorch issue 151223")
      for name, how, in_place in (("data_assigned", "get new storage", False), ("changed_in_place", "change in place", True))),
    lowered("mixed_precision.of_inputs", "Inputs that are cast get their gradients, keyword inputs too.",
            *(stored_in_float32(model, UnusualBackward(Batch(0), "of_inputs"), Observe(), Step(), optimizer=PLAIN_SGD,
                                precision=_LOW) for model in ("mlp", "two_inputs", "keywords")),
            source="torch.autograd.backward"),
    *(lowered(f"mixed_precision.loaded_{form}", f"A {form} state is loaded in the digits of storage, not of computation.",
              *(stored_in_float32(model, *iteration(0), Reload(form, optimizer=False), Observe(), *iteration(1), precision=_LOW,
                                  optimizer=PLAIN_SGD) for model in ("mlp", "uneven")),
              source="torch.distributed.fsdp.MixedPrecision") for form in ("full", "sharded")),
    lowered("mixed_precision.loaded_moments", "Moments are loaded in the digits of storage, not of computation.",
            stored_in_float32("mlp uneven", *iteration(0), Reload(), Observe(), *iteration(1), precision=_LOW, optimizer=ADAMW),
            source="torch.distributed.fsdp.MixedPrecision"),
    lowered("mixed_precision.written_back", "Full parameters that a user edits are written back in the digits of storage.",
            *(stored_in_float32(model, *iteration(0), *before, EditFullParameters(("*.weight",), 0.7), Observe(), *after,
                                precision=_LOW, optimizer=PLAIN_SGD)
              for model, before, after in (("mlp", (), iteration(1)), ("uneven", (), iteration(1)),
                                           ("mlp", (micro_batch(1),), (Step(),)))),
            source="torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params"),
    lowered("mixed_precision.unit_inputs", "Only the root casts inputs: inner units receive what the model passes them.",
            stored_in_float32("precise_input", *iterations(2), precision=_LOW),
            source="torch.distributed.fsdp.MixedPrecision, cast_forward_inputs", needs={"nested_wrapping"}),
    lowered("mixed_precision.uncast_inputs", "A root that does not cast its inputs hands them to the model as they are.",
            *(stored_in_float32("casting", *iterations(2), forward(5, "eval"), optimizer=PLAIN_SGD, precision=precision,
                                wrapping=every_unit("casting", settings=("uncast_inputs",))) for precision in (_LOW, _BOTH)),
            source="torch.distributed.fsdp.MixedPrecision, cast_root_forward_inputs", needs={"nested_wrapping"}),
    *(lowered(f"mixed_precision.{name}", "A policy keeps batch norms in full precision, between layers that are cast.",
              *(stored_in_float32("batch_norm", *iterations(2), forward(5, "no_grad"), micro_batch(2), Observe(),
                                  optimizer=PLAIN_SGD, precision=MixedPrecisionSpec("bfloat16", "float32", buffers),
                                  wrapping=WrappingPlan(policy=policy, settings=("precise_norms",)))
                for policy in (PolicySpec("module_class", ("Linear",)), PolicySpec("size", min_numel=30))),
              source="torch.distributed.fsdp.MixedPrecision, _module_classes_to_ignore", sizes=ODD)
      for name, buffers in (("batch_norms", None), ("batch_norms_beside_buffers", "bfloat16"))),
    *(lowered(f"mixed_precision.{name}", meaning,
              *(stored_in_float32(model, *iterations(2), *micro_batches(2), optimizer=PLAIN_SGD, precision=precision,
                                  wrapping=every_unit(model, settings=("low_gradients",)))
                for model in ("mlp", "uneven") for precision in precisions),
              source="torch.distributed.fsdp.MixedPrecision, keep_low_precision_grads")
      for name, meaning, precisions in (
        ("low_gradients", "Gradients that stay in low precision are those that were reduced, and are stepped.", (_LOW,)),
        ("low_gradients_as_reduced", "Gradients that are kept as reduced have that dtype, narrower or wider than computation's.",
         (MixedPrecisionSpec(None, "bfloat16"), _BOTH)),
    )),
    lowered("mixed_precision.changed_in_forward", "After a forward, weights keep the digits that the compute dtype lacks.",
            stored_in_float32("self_clipping", *iterations(3), optimizer=PLAIN_SGD, precision=_LOW),
            source="torch.nn.Module: parameters are the module's own", needs={"forward_edits"}),
    lowered("mixed_precision.thawed",
            "A unit that was frozen in the first forward is reduced and stepped in the right dtypes once it is thawed.",
            *(stored_in_float32("mlp", *iteration(0), Thaw(("layers.1.*",)), Observe(), *iterations(2, first=1), micro_batch(3),
                                precision=precision, freeze=("layers.1.*",)) for precision in (_BOTH, _LOW)),
            source="pytorch issue 186998"),
)  # fmt: skip
"""Every cast at its place, compared with a replay of the same casts."""

_NORMS = (1.0, 2.0, math.inf)
_SOURCE = "torch.nn.utils.clip_grad_norm_"
_IGNORING = WrappingPlan(units=("layers.1", "layers.2"), ignored=("layers.0",))
_LAST_BIAS = ("layers.0.*", "layers.1.*", "layers.2.weight")
_LAST_OF_ONE = ("first.*", "second.linear.*", "second.linear")

_TO_FLOAT32 = MixedPrecisionSpec(None, "float32")
_SUMS = (*accumulated(0, 1, 2), Observe(), Step(), ZeroGrad(), *micro_batches(3, 4, 5), Observe())

stored_low = partial(lowered, source="torch.distributed.fsdp.MixedPrecisionPolicy, reduce_dtype")

STORED_LOW: tuple[Check, ...] = (
    *(stored_low(f"stored_low.{name}", meaning,
                 *(cases("mlp uneven", *iterations(2), micro_batch(2), dtype=dtype, optimizer=optimizer, precision=precision)
                   for dtype, optimizer in (("bfloat16", ADAMW), ("float16", PLAIN_SGD))), sizes=ODD)
      for name, meaning, precision in (
        ("trained", "A model stored in 16 bits trains in its own dtype.", None),
        ("reduced_in_float32", "A model stored in 16 bits reduces its gradients in float32.", _TO_FLOAT32),
    )),
    *(stored_low(f"stored_low.{name}", meaning,
                 stored_in_bfloat16("mlp", *_SUMS, optimizer=PLAIN_SGD, precision=precision),
                 needs={"accumulate_without_no_sync"}) for name, meaning, precision in (
        ("accumulated", "Local and reduced micro-batches of a model stored in 16 bits add up.", None),
        ("accumulated_in_float32",
         "Local micro-batches of a model stored in 16 bits add up in the dtype in which they are reduced.", _TO_FLOAT32),
    )),
    # The last gradients are smaller than the roundings of the sum that was there.
    stored_low("stored_low.zeroed", "Zeroed 16-bit gradients leave nothing behind, rounding errors of their sum included.",
               stored_in_bfloat16("mlp", *micro_batches(0, 1, 2), EditGradients(("*",), "zeros"), micro_batch(3, scale=2.0**-8),
                           Observe(), Step(), optimizer=PLAIN_SGD, precision=_TO_FLOAT32),
               needs={"accumulate_without_no_sync"}),
    stored_low("stored_low.clipped", "Gradients in 16 bits are clipped by the norm over all ranks.",
               *(cases("mlp", micro_batch(0), Clip(0.1, norm_type), Observe(), Step(), dtype=dtype)
                 for norm_type in _NORMS for dtype in ("bfloat16", "float16"))),
    *(stored_low(f"stored_low.reloaded_{form}", f"A model in 16 bits and its optimizer are saved in {form} form and loaded "
                 "without a rounding.",
                 stored_in_bfloat16("mlp uneven", *iterations(2), Reload(form), *iteration(2), optimizer=ADAMW))
      for form in ("full", "sharded")),
    stored_low("stored_low.offloaded", "A model in 16 bits trains from the host as from the device.",
               stored_in_bfloat16("mlp uneven", *iterations(2), micro_batch(2), optimizer=ADAMW, offload=True)),
)  # fmt: skip
"""Models whose parameters are stored in bfloat16 or float16."""

clipped = partial(check, source=_SOURCE)


def _by(norm_type: float, dtype: str) -> tuple[Case, ...]:
    program = *iteration(0, Clip(0.1, norm_type), Observe()), micro_batch(1), Clip(0.5, norm_type), Step()
    return cases("mlp uneven", *program, dtype=dtype)


CLIPPING: tuple[Check, ...] = (
    *(clipped(f"clipping.norm_{name}",
              f"The {norm_type:g}-norm counts every element of every rank once, and gradients are scaled by it.",
              _by(norm_type, "float32"), source=source, sizes=ODD) for name, norm_type, source in (
        ("1", 1.0, _SOURCE), ("2", 2.0, "pytorch PR 88955"), ("2_5", 2.5, _SOURCE), ("3", 3.0, _SOURCE),
        ("inf", math.inf, "pytorch PR 73405; torchrec PR 3199"),
    )),
    clipped("clipping.not_needed", "Gradients below the limit are left alone.",
            *(stored_in_float32("mlp", micro_batch(0), Clip(1e6, norm_type), Observe(), Step()) for norm_type in _NORMS)),
    clipped("clipping.frozen_parameters", "Frozen parameters do not count, and units without gradient do no harm.",
            *(stored_in_float32("frozen_body", micro_batch(0), Clip(0.1, norm_type), Step()) for norm_type in (2.0, math.inf)),
            source="pytorch PR 88955"),
    clipped("clipping.frozen_later", "A gradient counts although its parameter was frozen since.",
            *(stored_in_float32("mlp", micro_batch(0), Freeze(("layers.0.*",)), Clip(0.1, norm_type), Observe(), Step())
              for norm_type in _NORMS)),
    clipped("clipping.thawed", "Parameters count from the first step on in which they train.",
            *(stored_in_float32("mlp", *iteration(0, Clip(0.1, norm_type)), Thaw(("layers.0.*",)),
                                *iteration(1, Clip(0.1, norm_type), Observe()), freeze=("layers.0.*",)) for norm_type in _NORMS)),
    clipped("clipping.shared_parameters", "A shared parameter counts once.",
            stored_in_float32("tied_within", micro_batch(0), Clip(0.1), Observe(), Step())),
    # Ignored parameters are not reduced: with equal inputs their gradients are equal on all ranks anyway.
    clipped("clipping.ignored_trained", "Parameters that stay outside count in the norm once, and are scaled with the others.",
            *(stored_in_float32("mlp", micro_batch(0, alike=True), Clip(0.1, norm_type), Observe(), Step(),
                                wrapping=_IGNORING, optimizer=PLAIN_SGD) for norm_type in _NORMS),
            source="https://pytorch.org/docs/stable/fsdp.html", needs={"nested_wrapping"}),
    clipped("clipping.zero_dim", "Parameters of shape () count in the norm.",
            *(stored_in_float32("scalars", micro_batch(0), Clip(0.1, norm_type), Observe(), Step()) for norm_type in _NORMS)),
    clipped("clipping.repeated", "Gradients that are already clipped can be clipped again.",
            stored_in_float32("mlp", *iteration(0), micro_batch(1), Clip(0.5), Clip(0.1), Clip(0.1, 1.0), Step())),
    clipped("clipping.ranks_without_elements", "Ranks that hold no element of a parameter take part.",
            *(stored_in_float32("one_element", micro_batch(0), Clip(0.1, norm_type), Observe(), Step())
              for norm_type in _NORMS),
            source="torchrec PR 3199", needs={"uneven_parameters"}, sizes=ODD),
    clipped("clipping.double_precision", "Gradients in float64 are clipped by a norm in float64.", _by(2.0, "float64")),
    clipped("clipping.unit_dtypes", "Units of different dtypes share one norm.",
            # Also with float32 beside float64: beside bfloat16 any bound allows errors of a few hundredths.
            *(cases("two_dtypes", micro_batch(0), Clip(0.1, norm_type), Observe(), Step(), dtype=dtype)
              for dtype in ("float32", "float64") for norm_type in _NORMS),
            source="pytorch issue 171517, PR 173641", needs={"nested_wrapping"}),
    # The last bias alone trains: the first ranks hold none of it where a unit is flattened; nor do the last of one element.
    clipped("clipping.ranks_without_gradients",
            "A rank that holds no trainable element takes part in the norm and in every reduction.",
            *(stored_in_float32(model, *iteration(0, Clip(0.1, norm_type), Observe()), *iteration(1), freeze=freeze)
              for model, norm_type, freeze in (
                ("mlp", 2.0, _LAST_BIAS), ("mlp", math.inf, _LAST_BIAS), ("one_element", 2.0, _LAST_OF_ONE))),
            source="pytorch PR 88955; B060", needs={"frozen_mixed_unit", "uneven_parameters"}),
    clipped("clipping.earlier_norms", "A norm does not depend on earlier norms, even on ranks without gradients.",
            *(stored_in_float32("mlp", micro_batch(0), Clip(1e6, math.inf), ZeroGrad(),
                                micro_batch(1), Clip(0.1, norm_type), Observe(), Step(), freeze=_LAST_BIAS)
              for norm_type in (2.0, math.inf)),
            source="found by fuzzing FSDP1, which adds the first infinity norm to every later norm",
            needs={"frozen_mixed_unit"}),
    *(lowered(f"clipping.{name}", meaning, stored_in_float32("mlp", micro_batch(0), Observe()), source=_SOURCE,
              needs={"clip_grad_norm", *needs}, mode=poisoned(value, raises=bool(needs)))
      for name, meaning, value, needs in (
        ("infinite", "An infinite gradient on one rank makes the norm infinite on every rank.", math.inf, ()),
        ("not_a_number", "A NaN in a gradient makes the norm NaN on every rank.", math.nan, ()),
        ("error_if_nonfinite", "With `error_if_nonfinite` every rank raises, and no gradient is scaled.", math.inf,
         ("error_if_nonfinite",)),
    )),
)  # fmt: skip
"""By the total norm over all ranks; where a gradient is not finite, the norm says so on every rank."""

# No step: gradients are a function of the initial values, so the rank's own are known without the other ranks.
_UNSTEPPED = cases("mlp uneven", micro_batch(0), Observe(), ZeroGrad(), micro_batch(1), optimizer=PLAIN_SGD)

PARAMETER_HOOKS: tuple[Check, ...] = (
    check("parameter_hooks.own_gradient",
          "A hook on a parameter receives this rank's own gradient before it is reduced, and the next is given its "
          "result.",
          _UNSTEPPED, source="torch.Tensor.register_hook", needs={"tensor_hooks"}, mode=OWN_GRADIENT),
    check("parameter_hooks.added_in_backward",
          "A hook that is added in backward runs after what was there, from the next backward on.",
          _UNSTEPPED, source="torch.Tensor.register_hook", needs={"tensor_hooks"}, mode=ADDED_IN_BACKWARD),
    check("parameter_hooks.zeros", "A gradient that a hook makes zero is zero, not None.",
          _UNSTEPPED, source="torch.Tensor.register_hook", needs={"tensor_hooks"}, mode=ZEROED),
    check("parameter_hooks.after_accumulation",
          "A hook that runs after accumulation finds the reduced gradient in `.grad`, once in each backward.",
          _UNSTEPPED, cases("mlp", *micro_batches(0, 1), Observe(), optimizer=PLAIN_SGD),
          source="torch.Tensor.register_post_accumulate_grad_hook; torchrec PR 4268",
          needs={"accumulation_hooks", "accumulate_without_no_sync"}, mode=AFTER_ACCUMULATION),
    check("parameter_hooks.in_no_sync", "A hook that runs after accumulation is not called without a gradient in no_sync.",
          cases("mlp uneven", no_sync_batch(0), micro_batch(1), Observe(), optimizer=PLAIN_SGD),
          source="torch.Tensor.register_post_accumulate_grad_hook", needs={"accumulation_hooks"}, mode=AFTER_ACCUMULATION),
    check("parameter_hooks.steps_in_backward", "Hooks may step and clear each parameter in backward, one optimizer for each.",
          *(cases("mlp uneven", *iterations(3), forward(5), optimizer=optimizer) for optimizer in (PLAIN_SGD, ADAMW)),
          source="torch.Tensor.register_post_accumulate_grad_hook", needs={"accumulation_hooks"}, mode=STEPS_IN_BACKWARD,
          comparison=Comparison(optimizer=False)),
    *(check(f"parameter_hooks.{name}", f"A hook that {changes}, registered before wrapping, runs in every backward.",
            cases("mlp uneven", *iterations(2), micro_batch(2), Observe(), optimizer=ADAMW),
            source=source, needs={"early_hooks"}, mode=mode, sizes=ODD) for name, changes, source, mode in (
        ("before_wrapping", "returns another gradient", "torch.Tensor.register_hook", EARLY),
        ("changes_before_wrapping", "changes `.grad`", "torch.Tensor.register_post_accumulate_grad_hook",
         EARLY_AFTER_ACCUMULATION),
    )),
)  # fmt: skip
"""Hooks that users register on parameters: their arguments, when they run, and whether their result counts."""

CHECKS = (*MIXED_PRECISION, *STORED_LOW, *CLIPPING, *PARAMETER_HOOKS)
