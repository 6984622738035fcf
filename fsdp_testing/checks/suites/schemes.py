"""Judges what ranks did: events and streams against the promises of sharding, real models, hybrid sharding.

The numbers of traced runs are compared too, and must hold first. Ranks on the CPU get streams and events that are recorded; an
access without a wait is a race on a device, even if the numbers are right here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.operations import LocalMicroBatches, UnshardFirst
from fsdp_testing.cases.records import (
    Batch,
    Case,
    Clip,
    EditFullParameters,
    Interrupt,
    MixedPrecisionSpec,
    Observe,
    Reload,
    SetLr,
    Step,
    Thaw,
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
    micro_batches,
    no_sync_batch,
)
from fsdp_testing.checks.suites.hooks import AFTER_ACCUMULATION
from fsdp_testing.checks.suites.options import recomputed
from fsdp_testing.checks.suites.programs import AFTER_ONE_REPLICA, COPY, IN_EVALUATION, MUST_COPY
from fsdp_testing.checks.suites.watched import GATHERS_LIMITED, STREAMS_OBSERVED, traced
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.judging.checkers import event_rules, shares
from fsdp_testing.oracle.quantities import Comparison

_SHARDED = ("full_shard", "shard_grad_op")
_VLDB = "PyTorch FSDP, VLDB 2023, section 3"

watched = partial(check, needs={"unit_trace"}, source=_VLDB)
_NEST, _TWO = cases("deep_nest", *iterations(2)), cases("mlp deep_nest", *iterations(2))

TRACES: tuple[Check, ...] = (
    watched("trace.same_collectives", "Every rank issues the same collectives in the same order.",
            cases("deep_nest", *accumulated(0, 1), Step(), forward(2, "no_grad"), *accumulated(3, 4)),
            source="torch.distributed: collectives of a group match in order", mode=traced(event_rules.same_collectives)),
    watched("trace.gathered_and_freed",
            "Units are gathered and freed in turn, and after the last backward no unit is gathered.", _NEST,
            mode=traced(event_rules.gathered_once, event_rules.all_freed), strategies=_SHARDED),
    watched("trace.held_while_used", "No module runs while the full parameters of its unit are freed.", _NEST,
            mode=traced(event_rules.held_while_used), strategies=_SHARDED),
    watched("trace.gathers_needed",
            "No unit is gathered more often than the strategy needs, nor more bytes than parameters and padding.", _TWO,
            mode=traced(event_rules.gathers_needed)),
    watched("trace.reductions_needed",
            "Gradients are reduced once for every unit and synchronised backward, and not in no_sync.",
            cases("mlp", *accumulated(0, 1, 2), Step()), mode=traced(event_rules.reductions_needed)),
    watched("trace.nested_no_sync", "After a nested no_sync ends, the outer one still reduces nothing.",
            cases("mlp", LocalMicroBatches((Batch(0), Batch(1)), nested=True), micro_batch(2), Step()),
            mode=traced(event_rules.reductions_needed)),
    watched("trace.recomputed", "Recomputing activations gathers and reduces nothing twice in backward.",
            *(cases("mlp", *iterations(2), wrapping=recomputed("mlp", outside=outside)) for outside in (False, True)),
            source="pytorch PR 89781", mode=traced(event_rules.gathers_needed, event_rules.reductions_needed)),
    watched("trace.memory_bound",
            "Full parameters are held only for the running unit, the units around it and one prefetched unit.", _TWO,
            mode=traced(event_rules.within_memory), strategies=_SHARDED),
    watched("trace.order", "Units are gathered in the order in which they run, and in reverse for backward.",
            cases("mlp", *iterations(2)), cases("deep_nest", *iterations(2), wrapping=WrappingPlan(("inner",))),
            source=f"{_VLDB}.3.2; B009", mode=traced(event_rules.in_order), strategies=_SHARDED),
)  # fmt: skip
"""Ranks' actions, judged by the promises of sharding."""

observed = partial(check, source=f"{_VLDB}.3; pytorch PR 177319", mode=STREAMS_OBSERVED, needs={"streams"})
_UNITS = ("", *MODELS["deep_nest"].units)

STREAMS: tuple[Check, ...] = (
    observed("streams.training",
         "Two iterations: gathers wait for the step before, compute for gathers, reductions for gradients, the step for both.",
             cases("mlp deep_nest", *iterations(2), optimizer=ADAMW)),
    observed("streams.accumulation", "Micro-batches inside no_sync and outside, gradients cleared between.",
             cases("deep_nest", *accumulated(0, 1), Step(), ZeroGrad(), *accumulated(2, 3), Step())),
    observed("streams.mixed_precision", "Casts before gathers and around reductions.",
             cases("mlp", *iterations(2), dtype="float32", precision=MixedPrecisionSpec("bfloat16", "float32")),
             comparison=LOCKSTEP),
    observed("streams.clipping", "Clipping reads gradients after they are reduced, and the step reads them after "
        "clipping.",
             cases("mlp", *iteration(0, Clip(0.1)), *iteration(1, Clip(0.1)), dtype="float32")),
    observed("streams.forward_only", "Forward passes without backward, between iterations.",
             cases("deep_nest", forward(5), *iteration(0), forward(6, "no_grad"), *iteration(1))),
    observed("streams.prefetch", "Units are prefetched, in forward and in backward.",
             *(cases("deep_nest", *iterations(2),
                     wrapping=every_unit("deep_nest", forward_prefetch=True, backward_prefetch=backward))
               for backward in ("pre", "post"))),
    observed("streams.tuned_communication", "Gathers wait for the event that the user recorded after the step.",
             cases("mlp", *iterations(3), wrapping=every_unit("mlp", settings=("tuned_communication",)), optimizer=PLAIN_SGD),
             source="torch.distributed.fsdp.FSDPModule.set_post_optim_event"),
    observed("streams.summon", "Full parameters are edited between iterations, and the next gather waits for the edit.",
             cases("mlp", *iteration(0), EditFullParameters(("*",), 0.5, True), *iteration(1))),
    observed("streams.unshard", "Units gathered by hand, without waiting, before a micro-batch.",
             cases("deep_nest", *iteration(0), UnshardFirst(Batch(1), _UNITS, asynchronous=True), Step(), ZeroGrad()),
             needs={"streams", "nested_wrapping"}),
    observed("streams.state", "State is saved after a step, loaded into another instance, and trained on.",
             cases("mlp", *iteration(0), Reload("full"), *iteration(1), optimizer=ADAMW)),
    observed("streams.hybrid",
             "The second reduction, over replicas, waits for the first one, and its input is kept until it ends.",
             cases("deep_nest", *iterations(2)),
             cases("deep_nest", *iterations(2), dtype="float32", precision=MixedPrecisionSpec(None, "bfloat16")),
             comparison=LOCKSTEP, strategies=HYBRID, meshes={4: ((2, 2),), 2: ((1, 2),)}, needs={"streams", "hybrid"},
             sizes=TWO_BY_TWO),
    observed("streams.limited_gathers",
             "The host runs ahead of the device by two all-gathers at most.",
             cases("deep_nest", *iterations(3), wrapping=every_unit("deep_nest", forward_prefetch=True)),
             cases("deep_nest", *(forward(batch, "no_grad") for batch in range(3))),
             source=f"{_VLDB}.4", mode=GATHERS_LIMITED, strategies=_SHARDED, of_pieces=True,
             needs={"streams", "limited_gathers"}),
)  # fmt: skip
"""On a device, nothing is used on one stream before another one is done with it."""

gpt = partial(check, source="Radford et al. 2019")
moe = partial(check, source="Shazeer et al. 2017")
_EVERY_REDUCED = {"accumulate_without_no_sync"}
_SCHEDULE = (
    *(*accumulated(0, 1), Clip(0.5), Step(), ZeroGrad(), forward(2, "no_grad")),
    *(*micro_batches(3, 4), Clip(0.5, 1.0), Step(), ZeroGrad(), forward(5)),
)

REAL_MODELS: tuple[Check, ...] = (
    gpt("gpt.trained", "A GPT block stack trains as in one process.", cases("gpt", *iterations(3), optimizer=ADAMW)),
    gpt("gpt.schedule", "With accumulation, clipping and evaluation in between.",
        cases("gpt", *_SCHEDULE, dtype="float32"), needs=_EVERY_REDUCED),
    gpt("gpt.bfloat16", "In bfloat16 with float32 reduction, every cast happens in the right place.",
        cases("gpt", *iterations(2), dtype="float32", precision=MixedPrecisionSpec("bfloat16", "float32"), optimizer=PLAIN_SGD),
        source="pytorch PR 90660", comparison=LOCKSTEP),
    moe("moe.trained", "A mixture of experts trains as in one process.", cases("moe", *iterations(3), optimizer=ADAMW)),
    moe("moe.schedule", "With accumulation, clipping and evaluation in between.",
        cases("moe", *_SCHEDULE, dtype="float32"), needs=_EVERY_REDUCED),
)  # fmt: skip
"""A GPT block stack with tied embeddings, and a mixture of experts whose experts may get no token."""

_BODY = ("layers.1.*",)
hybrid = partial(
    check,
    profile="extended",
    strategies=HYBRID,
    needs={"hybrid"},
    meshes={4: ((2, 2),), 6: ((3, 2), (2, 3)), 8: ((2, 4), (4, 2)), 2: ()},
    sizes=(4,),
)


def _combined(wrapping: WrappingPlan, *, alike: bool) -> Iterator[tuple[Case, ...]]:
    """Yield cases; inputs are equal on all ranks if parameters are ignored, because their gradients are not averaged."""
    for norm_type in (2.0, math.inf):
        yield cases("mlp", no_sync_batch(0, alike=alike), micro_batch(1, alike=alike), Observe(), Clip(0.1, norm_type),
                    Observe(), Step(), dtype="float32", precision=MixedPrecisionSpec(None, "bfloat16"),
                    optimizer=PLAIN_SGD, wrapping=wrapping)  # fmt: skip


HYBRID_SHARDING: tuple[Check, ...] = (
    hybrid("hybrid.trained", "Gradients are averaged over shards and replicas.",
           cases("mlp uneven deep_nest", *iterations(3), optimizer=ADAMW),
           cases("partly_used", *iterations(2, usage=((True, False),)), optimizer=PLAIN_SGD), source="pytorch PR 89915"),
    *(hybrid(f"hybrid.{name}", f"Replicas train alike: {what}.", cases(model, *program, optimizer=PLAIN_SGD, **options),
             source="PyTorch FSDP, VLDB 2023, section 3.2.2")
      for name, what, model, program, options in (
        ("shared", "parameters under two names", "tied_within", iterations(2), {}),
        ("zero_dim", "parameters of shape ()", "scalars", iterations(2), {}),
        ("one_unit", "a model of one unit", "mlp uneven", iterations(2), {"wrapping": WrappingPlan()}),
        ("shared_across_units", "a parameter in two units", "tied_across", iterations(2), {}),
        ("bare_root", "a root without parameters", "bare_root", iterations(2), {}),
        ("thawed", "units that are thawed", "mlp", (*iteration(0), Thaw(_BODY), *iterations(2, first=1)), {"freeze": _BODY}),
        ("recomputed", "activations that are computed again", "mlp", iterations(2), {"wrapping": recomputed("mlp")}),
        ("interrupted", "after exceptions", "mlp", (Interrupt(Batch(9), 1), *iteration(0), Interrupt(Batch(8), 1, backward=True),
                                                    *iteration(1)), {}))),
    hybrid("hybrid.evaluated", "Replicas train alike: a model in evaluation.", cases("mlp", *iterations(2), optimizer=PLAIN_SGD),
           source="torch.nn.Module.eval", mode=IN_EVALUATION),
    hybrid("hybrid.copied", "Replicas train alike: a deep copy.",
           cases("mlp", *iteration(0), Observe(COPY), micro_batch(1), Observe(), Step(), optimizer=PLAIN_SGD),
           source="copy.deepcopy", needs={"hybrid", "deep_copies"}, mode=MUST_COPY),
    hybrid("hybrid.two_dtypes", "Replicas train alike: units of two dtypes.",
           *(cases("two_dtypes", *iterations(2), optimizer=PLAIN_SGD, wrapping=plan) for plan in (None, WrappingPlan())),
           source="pytorch issue 154082", needs={"hybrid", "mixed_dtype_units"}),
    hybrid("hybrid.written_back", "Every replica keeps edits of full parameters.",
           cases("mlp uneven", *iteration(0), EditFullParameters(("*",), 0.5), Observe(), *iteration(1)),
           source="torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params"),
    hybrid("hybrid.hooks", "A hook that runs after accumulation finds the mean over replicas, too.",
           cases("mlp uneven", micro_batch(0), Observe(), optimizer=PLAIN_SGD), mode=AFTER_ACCUMULATION,
           source="torch.Tensor.register_post_accumulate_grad_hook", needs={"hybrid", "accumulation_hooks"}),
    # As in mixed_precision.local_sums: a sum over the replicas in 8 bits loses what the sum before it holds.
    hybrid("hybrid.local_sums", "Sums of low-precision gradients are reduced over replicas too in the dtype of reduction.",
           cases("mlp", LocalMicroBatches(tuple(map(Batch, range(16)))), micro_batch(16), Observe(), Step(), dtype="float32",
                 optimizer=PLAIN_SGD, precision=MixedPrecisionSpec("bfloat16", "float32")),
           source="pytorch PR 125484, 126166", comparison=LOCKSTEP),
    *(hybrid(f"hybrid.unused_{what}", f"Replicas may use different {what}.",
             cases(model, *iterations(2, usage=(first, first, last, last)), optimizer=PLAIN_SGD),
             source="torch.nn.parallel.DistributedDataParallel, find_unused_parameters",
             comparison=Comparison(none_is_zero=True))
      for what, model, first, last in (("parameters", "partly_used", (True, False), (False, True)),
                                       ("units", "conditional", (True, False, False), (False, True, True)))),
    *(hybrid(f"hybrid.reloaded_{form}", f"Every replica loads the {form} state of model and optimizer.",
             cases("mlp uneven buffers", *iterations(2), SetLr(0.02), Reload(form), Observe(), *iterations(2, first=2),
                   optimizer=ADAMW),
             source="torch.distributed.checkpoint.state_dict", needs={"hybrid", "optim_state", f"{form}_state_dict"})
      for form in ("full", "sharded")),
    hybrid("hybrid.shares", "The ranks of a replica hold it together, each its share.", cases("mlp wide"),
           mode=RunMode(review=shares.review), of_pieces=True, source="torch.distributed.fsdp.ShardingStrategy"),
    hybrid("hybrid.rank_0_parameters", "Replicas that start with different parameters and buffers get rank 0's.",
           cases("buffers", Observe(), *iterations(2), wrapping=every_unit("buffers", sync_module_states=True)),
           source="https://pytorch.org/docs/stable/fsdp.html"),
    hybrid("hybrid.schedule", "With accumulation and clipping.",
           cases("mlp", *accumulated(0, 1), Observe(), Clip(0.1), Step(), ZeroGrad(), *micro_batches(2, 3), dtype="float32"),
           source="pytorch PR 125484, 126166", needs={"hybrid", *_EVERY_REDUCED}),
    hybrid("hybrid.degenerate_groups", "Groups of one rank: replicas are still averaged, and shards still gathered.",
           cases("mlp", micro_batch(0), Observe(), Step()),
           source="pytorch issue 154888", meshes={4: ((4, 1), (1, 4)), 3: ((3, 1),), 2: ((2, 1), (1, 2))},
           sizes=(*ODD, 4)),
    hybrid("hybrid.combined", "Gradients are reduced in a separate dtype and clipped, with ignored parameters too.",
           *_combined(WrappingPlan(units=("layers.1", "layers.2"), ignored=("layers.0",)), alike=True),
           *_combined(every_unit("mlp"), alike=False),
           source="pytorch PR 125484, 126166", comparison=LOCKSTEP, needs={"hybrid", "nested_wrapping"}),
    hybrid("hybrid.norms", "Each element counts once in a norm, even if shard groups have one rank.",
           *(cases("mlp", micro_batch(0), Clip(0.1, norm_type), Observe(), Step(), dtype="float32")
             for norm_type in (2.0, math.inf)),
           source="pytorch PR 88955", meshes={4: ((2, 2), (4, 1)), 2: ((2, 1), (1, 2))}),
    hybrid("hybrid.one_replica_evaluates", "One replica evaluates alone, then all of them train.",
           cases("mlp", *iterations(2)), mode=AFTER_ONE_REPLICA, needs={"hybrid", "forward_only"},
           source="uneven validation batches per replica: gathers travel inside a shard group only"),
)  # fmt: skip
"""Sharded inside a group, replicated across groups; four ranks."""

CHECKS = (*TRACES, *STREAMS, *REAL_MODELS, *HYBRID_SHARDING)
