"""What users can access: outputs of units, full parameters, units gathered by hand, offloaded parameters; DDP beside them."""

from __future__ import annotations

from functools import partial

from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.operations import AssignData, EditGradients, ReplaceParameters, UnshardFirst
from fsdp_testing.cases.records import (
    Batch,
    Clip,
    EditFullParameters,
    MixedPrecisionSpec,
    Observe,
    Operation,
    Step,
    ZeroGrad,
)
from fsdp_testing.checks.suites.check import (
    ADAMW,
    LOCKSTEP,
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
)
from fsdp_testing.checks.suites.watched import BESIDE_DDP
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.judging.checkers import overruns

OUTPUTS: tuple[Check, ...] = (
    check("outputs.containers", "Units that return tuples, lists, dicts, named tuples or dataclasses train as in one process.",
          *(cases("containers", *iterations(2), arguments={"container": container})
            for container in MODELS["containers"].arguments["container"]),
          source="pytorch issue 77812; PR 173415, 174692"),
    check("outputs.parameters", "A parameter that a unit returns can be used outside it, and gets the gradient of that use.",
          cases("returned_parameters", *iterations(2)), source="torch.nn.Module.forward"),
    check("outputs.opaque_objects", "Units that return objects of a user's class train as in one process.",
          cases("opaque_output", *iterations(2)), source="pytorch PR 173415"),
    check("outputs.bypassed", "A loss may use a tensor that a unit stored instead of its output.",
          *(cases("cached_intermediate", *iterations(2), arguments={"bypass": bypass}) for bypass in (True, False)),
          source="pytorch issue 173709, PR 174829"),
    check("outputs.views_changed_in_place", "The caller may change a unit's output in place, even if it is a view.",
          cases("view_output", *iterations(2)), source="pytorch issue 181832, PR 181850"),
)  # fmt: skip
"""Outputs other than one fresh tensor: containers, objects, views, intermediate results."""

_EDIT = EditFullParameters(("*",), 0.5, True)
_DISCARDED = EditFullParameters(("*",), 0.5, False)
_STORED = ReplaceParameters(("*.weight",), 0.5, storage=True)


def _assigned(seed: int) -> AssignData:
    return AssignData(("layers.0.*", "layers.2.weight"), 0.5, Batch(seed))


summoned = partial(check, source="torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params")

SUMMON: tuple[Check, ...] = (
    summoned("summon.edits_are_kept", "Edits of full parameters persist on every rank.",
             cases("mlp uneven", *iteration(0), _EDIT, Observe(), forward(9),
                   *iteration(1), EditFullParameters(("*.weight",), 0.5, True), Observe(), optimizer=ADAMW)),
    summoned("summon.frozen_edits", "Edits of frozen parameters persist, beside those of trained ones.",
             cases("mlp", *iteration(0), _EDIT, Observe(), *iteration(1), optimizer=ADAMW, freeze=("layers.1.*",))),
    check("summon.before_first_forward", "Editing before the first forward.",
          cases("mlp", _EDIT, forward(9), *iterations(2)), source="pytorch PR 90862"),
    summoned("summon.between_backward_and_step", "Editing keeps gradients that wait for a step.",
             cases("mlp", *iteration(0, _EDIT, Observe()), *iteration(1))),
    check("summon.edits_are_discarded",
          "Without writeback, edits of gathered parameters are gone after the context.",
          cases("mlp uneven", *iteration(0), _DISCARDED, Observe(), forward(9), micro_batch(1), _DISCARDED, Step(),
                optimizer=ADAMW),
          source="pytorch summon_full_params: writeback, which its documentation limits to sharded strategies",
          strategies=("full_shard", "shard_grad_op")),
    check("summon.data_assigned", "A parameter with new storage between iterations trains on from its new values.",
          cases("mlp", _assigned(8), Observe(), *iteration(0), _assigned(9), forward(10), *iteration(1), Observe(),
                optimizer=ADAMW),
          cases("mlp", *iteration(0), micro_batch(1), forward(7, "no_grad"), _assigned(8), Observe(), Step(), forward(9)),
          source="pytorch issue 151223"),
    # Between forward and backward some strategies show full parameters, which are freed later.
    check("summon.data_assigned_after_forward", "New storage of parameters after a forward without a backward is their value.",
          cases("mlp deep_nest", *iteration(0), forward(7, "train"), AssignData(("*",), 0.5, Batch(8)), Observe(), *iteration(1)),
          source="pytorch issue 151223"),
    check("summon.changed_in_place", "Parameters that change in place after a forward without a backward keep the change.",
          cases("mlp deep_nest", *iteration(0), forward(7, "train"), AssignData(("*",), 0.5, Batch(8), in_place=True), Observe(),
                *iteration(1)),
          source="torch.nn.Parameter"),
    summoned("summon.parameters_replaced", "A tensor that replaces a gathered parameter becomes the parameter's value.",
             cases("mlp uneven", ReplaceParameters(("*.weight",), 0.5), forward(8), *iteration(0),
                   *iteration(1, ReplaceParameters(("layers.2.*",), -1.0), Observe()), *iteration(2), optimizer=ADAMW)),
    check("summon.storage_replaced", "New storage of a gathered parameter becomes its value.",
          cases("mlp", _STORED, forward(8), *iteration(0, _STORED, Observe()), *iteration(1)),
          source="pytorch issue 107081"),
    *(summoned(f"summon.gradients{replaced}", f"Gathered gradients{that_are} are kept on every rank, beside edits of parameters.",
               *(cases(model, micro_batch(0), EditGradients((pattern,), edit), Observe(), micro_batch(1), Observe(),
                       EditFullParameters(("*.weight",), 0.5, True), EditGradients(("*",), "halved"), Observe(), Step(),
                       ZeroGrad(), *iteration(2), optimizer=ADAMW, wrapping=every_unit(model, settings=("full_gradients",)))
                 for model, pattern, edit in edits), needs={"accumulate_without_no_sync", *needs})
      for replaced, that_are, edits, needs in (
        ("", " that change in place",
         (("mlp", "*.weight", "halved"), ("uneven", "layers.1.*", "zeros"), ("deep_nest", "*.bias", "zeros")), ()),
        ("_dropped", " that are dropped", (("mlp", "*.bias", "none"), ("uneven", "layers.1.*", "none")), ()),
        ("_replaced", " that are replaced", (("mlp", "*.weight", "replaced"), ("uneven", "layers.1.*", "replaced")),
         ("gradient_replacement",)),
        ("_given", " that are given to parameters without one", (("partly_used", "second.sometimes.*", "given"),),
         ("gradient_replacement",)),
    )),
    summoned("summon.reading", "Gathering parameters only to read them changes nothing.",
             cases("mlp", *iteration(0), EditFullParameters((), 0.5, False), Observe(), *iteration(1))),
)  # fmt: skip
"""Full parameters gathered, edited and written back between iterations."""


def _unsharded(model: str, seed: int, **fields: bool) -> tuple[Operation, ...]:
    return UnshardFirst(Batch(seed), ("", *MODELS[model].units), **fields), Step(), ZeroGrad()


released = partial(_unsharded, reshard=True)
begun = partial(_unsharded, asynchronous=True)
unsharded = partial(check, source="torch.distributed.fsdp.FSDPModule.unshard", needs={"nested_wrapping"})

UNSHARDING: tuple[Check, ...] = (
    unsharded("unshard.before_forward",
              "Units gathered by hand before a micro-batch train like others, whether or not the gather is waited for.",
              *(cases(model, *program) for model in ("deep_nest", "uneven") for program in (
                  [*_unsharded(model, 0), Observe(), *_unsharded(model, 1), Observe()],
                  [*begun(model, 2), *begun(model, 3), *begun(model, 4, reshard=True), Observe()]))),
    unsharded("unshard.and_reshard", "Units that were gathered and released are gathered again.",
              *(cases(model, *released(model, 0), *released(model, 1), Observe()) for model in ("deep_nest", "uneven"))),
    unsharded("unshard.gathers", "Gathering and releasing a unit by hand does so: its forward has to gather it again.",
              *(cases(model, *iteration(0), *released(model, 1))
                for model in ("deep_nest", "uneven")),
              cases("deep_nest", *iteration(0), *begun("deep_nest", 1, reshard=True)),
              needs={"nested_wrapping", "unit_trace"}, mode=RunMode(review=overruns.review_by_hand),
              strategies=("full_shard",), of_pieces=True),
    unsharded("unshard.sees_the_step", "A gather by hand gives the weights of the latest step.",
              cases("mlp", *iteration(0), forward(1), *_unsharded("mlp", 2), forward(3), *_unsharded("mlp", 4))),
)  # fmt: skip
"""Units gathered and released by hand: the next forward and the next step see the right weights."""

offloaded = partial(cases, offload=True)

OFFLOAD: tuple[Check, ...] = (
    check("offload.trained", "Trains as without offload.", offloaded("mlp uneven", *iterations(3), optimizer=ADAMW),
          source="torch CPUOffload, CPUOffloadPolicy"),
    check("offload.no_sync", "Local micro-batches and a reduced one add up.",
          offloaded("mlp", *accumulated(0, 1), Observe(), Step(), ZeroGrad(), *iteration(2)),
          source="pytorch issue 98494, PR 100180"),
    check("offload.without_no_sync", "Reduced micro-batches add up; a later one does not replace an earlier one.",
          offloaded("mlp", *micro_batches(0, 1), Observe(), Step()),
          source="pytorch issue 73784, PR 73535", needs={"accumulate_without_no_sync"}),
    check("offload.clipped", "Gradients on the CPU are clipped.",
          offloaded("mlp", micro_batch(0), Clip(0.1), Observe(), Step(), dtype="float32"), source="pytorch PR 86337"),
    check("offload.mixed_precision", "Casts as without offload.",
          offloaded("mlp", *iterations(2), dtype="float32", precision=MixedPrecisionSpec("bfloat16", "float32")),
          source="torch.distributed.fsdp.CPUOffloadPolicy, MixedPrecisionPolicy", comparison=LOCKSTEP),
)  # fmt: skip
"""CPU offload: the place of parameters does not change the numbers."""

_PRECISIONS = (
    MixedPrecisionSpec("bfloat16"),
    MixedPrecisionSpec("float16"),
    MixedPrecisionSpec("bfloat16", "float32"),
    MixedPrecisionSpec(None, "bfloat16"),
)

paired = partial(check, source="torch.nn.parallel.DistributedDataParallel on the same ranks", mode=BESIDE_DDP)

BESIDE: tuple[Check, ...] = (
    paired("beside_ddp.no_sync", "Local micro-batches and a reduced one give DDP's result.",
           cases("uneven", *accumulated(0, 1, 2), Observe(), Step(), ZeroGrad(), *accumulated(3, 4), Step(),
                 optimizer=ADAMW)),
    # One reduction, from equal values: low precision may amplify a difference in the last bit without any bound.
    paired("beside_ddp.mixed_precision", "A gradient computed and reduced in low precision equals DDP's, cast for "
        "cast.",
           *(cases("mlp", micro_batch(0), Observe(), dtype="float32", optimizer=PLAIN_SGD, precision=precision)
             for precision in _PRECISIONS), comparison=LOCKSTEP),
    paired("beside_ddp.offload", "Offloaded parameters train as DDP's do.",
           offloaded("uneven", *iterations(3), optimizer=ADAMW)),
    paired("beside_ddp.offload_no_sync", "Offloaded gradients accumulate as DDP's do.",
           offloaded("mlp", *accumulated(0, 1), Observe(), Step(), ZeroGrad(), *iteration(2))),
)  # fmt: skip
"""DDP as a second oracle: offload, no_sync and mixed precision give what DDP gives on the same ranks."""

CHECKS = (*OUTPUTS, *SUMMON, *UNSHARDING, *OFFLOAD, *BESIDE)
