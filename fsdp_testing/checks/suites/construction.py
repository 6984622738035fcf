"""Construction: wrapping moves numbers but changes none; first values come from rank 0 or the user's function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fsdp_testing.cases.operations import Reload, Step, ZeroGrad
from fsdp_testing.cases.records import (
    Case,
    FailureKind,
    Finding,
    Observe,
    OptimizerSpec,
    PolicySpec,
    RankObservation,
    WrappingPlan,
)
from fsdp_testing.checks.suites.check import (
    ADAMW,
    ODD,
    Check,
    accumulated,
    cases,
    check,
    every_unit,
    forward,
    iteration,
    iterations,
    micro_batch,
)
from fsdp_testing.checks.suites.options import recomputed
from fsdp_testing.checks.suites.programs import review_remarks
from fsdp_testing.checks.suites.state_programs import RemarkingProgram
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.judging.checkers import shares
from fsdp_testing.oracle import rank_jobs
from fsdp_testing.oracle.quantities import Comparison, Expectation

_NESTED = {"nested_wrapping"}
_LINEAR = WrappingPlan(policy=PolicySpec("module_class", classes=("Linear",)))
_BIG = WrappingPlan(policy=PolicySpec("size", min_numel=100))
_IGNORING = WrappingPlan(units=("layers.1", "layers.2"), ignored=("layers.0",))
_ONE_BY_ONE = OptimizerSpec("adamw", {**ADAMW.arguments, "foreach": False})
_AT_ONCE = OptimizerSpec("sgd", {"lr": 0.05, "momentum": 0.9, "foreach": True})

documented = partial(check, source="https://pytorch.org/docs/stable/fsdp.html")


def _started(models: str, **starts: Any) -> tuple[Case, ...]:
    """With every unit and with none, if a model has units: the root initialises its parameters differently from inner units."""
    return tuple(
        case
        for model in models.split()
        for plan in dict.fromkeys((every_unit(model, **starts), WrappingPlan(**starts)))
        for case in cases(model, Observe(), *iterations(2), wrapping=plan, optimizer=ADAMW)
    )


def _started_frozen(**starts: bool) -> tuple[Case, ...]:
    return cases("mlp", Observe(), *iterations(2), wrapping=every_unit("mlp", **starts), freeze=("layers.1.*",))


class WholeBehindShares(RemarkingProgram):
    """A program after which the memory behind the rank's pieces is measured: a piece may be cut from a whole parameter."""

    quantity = "memory of parameters"

    def statements(self) -> Iterator[str]:
        """Yield the memory behind the pieces if it has room for the whole model, of which the rank holds a part."""
        storages = {
            storage.data_ptr(): storage.nbytes()
            for pieces in self.adapter.local_pieces(self.model).values()
            for storage in (piece.value.untyped_storage() for piece in pieces if piece.value is not None)
        }
        held = sum(storages.values())
        whole = sum(parameter.nbytes for parameter in self.plain_part("").parameters())
        # One rank holds all there is.
        if self.case.world.size > self.case.world.tensor_parallel and held >= whole:
            yield f"memory of {held:,} bytes is behind the rank's pieces; the whole model has {whole:,} bytes"


def _review_memory(case: Case, ranks: Sequence[RankObservation], expectation: Expectation) -> Finding | None:
    finding = review_remarks(case, ranks, expectation)
    return None if finding is None else replace(finding, kind=FailureKind.KEPT)


CHECKS: tuple[Check, ...] = (
    documented("construction.keeps_numbers", "Wrapping keeps every value, dtype and requires_grad flag.",
               cases("mlp deep_nest uneven embedding")),
    documented("construction.shares", "Each rank holds its share of the parameters, and no more.",
               cases("mlp wide uneven"), mode=RunMode(review=shares.review), strategies=("full_shard", "shard_grad_op"),
               sizes=ODD, of_pieces=True),
    documented("construction.memory_of_shares", "A rank's share of the parameters is not cut from memory of the whole model.",
               cases("wide", *iteration(0)), mode=RunMode(rank_jobs.run_as, (WholeBehindShares, {}), review=_review_memory),
               strategies=("full_shard",), sizes=ODD, of_pieces=True),
    documented("construction.keeps_buffers", "Wrapping keeps every buffer.", cases("buffers")),
    documented("construction.first_forward", "The first forward gives the unwrapped module's output.",
               cases("mlp deep_nest keywords bare_root", forward(0, "train"), forward(1, "no_grad"))),
    documented("wrapping.root_only", "One unit that holds the whole model trains as one process does.",
               cases("mlp uneven", *iterations(2), wrapping=WrappingPlan())),
    check("wrapping.nested", "Units inside units, chosen by hand, train as one process does.",
          cases("deep_nest", *iterations(2)),
          cases("deep_nest", *iterations(2), wrapping=WrappingPlan(units=("inner.inner",))),
          cases("mlp", *iterations(2), wrapping=WrappingPlan(units=("layers.1",))),
          cases("bare_root", *iterations(2)),
          source="pytorch PR 90874", needs=_NESTED),
    check("wrapping.class_policy", "Units chosen by module class train as one process does.",
          cases("mlp deep_nest", *iterations(2), wrapping=_LINEAR), source="pytorch PR 91044"),
    check("wrapping.size_policy", "Units chosen by number of elements train as one process does.",
          cases("deep_nest", *iterations(2), wrapping=_BIG),
          source="torch.distributed.fsdp.wrap.size_based_auto_wrap_policy"),
    check("wrapping.policy_beside_units", "A policy leaves units that were chosen by hand as they are, and chooses the others.",
          cases("deep_nest", *iterations(2), optimizer=ADAMW,
                wrapping=WrappingPlan(("inner.inner", "inner.inner.inner"), PolicySpec("module_class", ("Wired",)))),
          cases("mlp", *iterations(2), optimizer=ADAMW, wrapping=replace(_LINEAR, units=("layers.1",))),
          source="torch.distributed.fsdp.FullyShardedDataParallel, auto_wrap_policy", needs=_NESTED),
    check("wrapping.ignored_frozen", "Ignored frozen modules stay whole and unchanged while the rest trains.",
          cases("mlp", *iterations(2), wrapping=_IGNORING, freeze=("layers.0.*",), optimizer=ADAMW),
          source="pytorch issue 104258, PR 104418", needs=_NESTED),
    check("wrapping.ignored_trained", "Ignored trainable modules keep their own gradients and disturb no others.",
          cases("mlp", micro_batch(0), Observe(), wrapping=_IGNORING),
          cases("batch_norm", micro_batch(0), Observe(), wrapping=WrappingPlan(units=("first", "second"), ignored=("norm",))),
          source="pytorch issue 98281", needs=_NESTED, comparison=Comparison(ignore=("layers.0.*", "norm.*")),
          mode=RunMode(review=shares.review_ignored)),
    # Ignored parameters are not reduced: with equal inputs their gradients are equal on all ranks anyway.
    check("wrapping.ignored_stepped",
          "One optimizer steps ignored parameters together with the others.",
          cases("mlp", *iteration(0, alike=True), *iteration(1, alike=True), wrapping=_IGNORING, optimizer=_AT_ONCE),
          cases("mlp", micro_batch(0, alike=True), Step(), ZeroGrad(False), Observe(), *iteration(1, alike=True),
                wrapping=_IGNORING, optimizer=_AT_ONCE),
          source="pytorch issue 183207", needs=_NESTED),
    *(check(f"wrapping.ignored_{form}", f"Ignored parameters are saved and loaded in {form} form, with their moments.",
            cases("mlp", *iteration(0, alike=True), Reload(form), Observe(), *iteration(1, alike=True), wrapping=_IGNORING,
                  optimizer=_ONE_BY_ONE),
            source="torch.distributed.checkpoint.state_dict", needs=_NESTED) for form in ("full", "sharded")),
    check("options.ignored_by_parameter_whole", "Parameters that are ignored one by one stay whole and keep their own gradients.",
          cases("mlp", micro_batch(0), Observe(), wrapping=replace(_IGNORING, settings=("ignored_by_parameter",))),
          source="torch.distributed.fsdp.FullyShardedDataParallel, ignored_states", needs=_NESTED,
          comparison=Comparison(ignore=("layers.0.*",)), mode=RunMode(review=shares.review_ignored)),
    check("options.ignored_by_parameter", "Parameters that are ignored one by one stay outside as those of an ignored module do.",
          *(cases("mlp", *iteration(0, alike=True), Reload(), *iteration(1, alike=True), optimizer=ADAMW,
                  freeze=frozen, wrapping=replace(plan, ignored=("layers.0",), settings=("ignored_by_parameter",)))
            for plan in (_IGNORING, _LINEAR, WrappingPlan()) for frozen in ((), ("layers.0.*",))),
          source="torch.distributed.fsdp.FullyShardedDataParallel, ignored_states",
          needs={"nested_wrapping", "policy_wrapping"}),
    check("options.ignored_by_units", "What inner units ignore stays outside of what is around them, too.",
          *(cases(model, micro_batch(0), Observe(),
                  wrapping=every_unit(model, ignored=ignored, settings=("ignored_by_units", *by)))
            for model, ignored in (("inner_modules", ("body.inner", "head.inner")), ("registered_outside", ("block.inner",)))
            for by in ((), ("ignored_by_parameter",))),
          source="torch.distributed.fsdp.FullyShardedDataParallel, ignored_states", needs=_NESTED,
          comparison=Comparison(ignore=("body.inner.*", "head.inner.*", "block.inner.*")),
          mode=RunMode(review=shares.review_ignored)),
    check("wrapping.module_hooks", "Hooks that users registered on modules read full parameters, and what they return counts.",
          cases("hooked", *iteration(0), forward(5), *iteration(1)),
          cases("hooked", *iterations(2), wrapping=recomputed("hooked")),
          source="torch.nn.Module.register_forward_pre_hook"),
    *(check(f"wrapping.{name}", meaning,
            cases("backward_hooked", *iterations(2), *accumulated(2, 3), Observe(), arguments={"reads_weight": reads_weight}),
            source=f"torch.nn.Module.register_full_{hook}", needs={"no_sync"}) for name, hook, reads_weight, meaning in (
        ("backward_hooks", "backward_hook", False, "What users' backward hooks on modules return counts."),
        ("backward_pre_hooks", "backward_pre_hook", True, "Users' backward pre-hooks on modules read full parameters."),
    )),
    check("wrapping.parametrized", "Parameters from which torch computes a module's weight train as in one process.",
          cases("weight_norm", *iterations(2), forward(5), micro_batch(6), optimizer=ADAMW),
          source="torch.nn.utils.parametrize"),
    check("wrapping.keyword_inputs", "Keyword and nested inputs reach the module unchanged.",
          cases("keywords", *iterations(2)), source="pytorch PR 91078"),

    documented("construction.rank_0_parameters",
               "Ranks that start with different parameters get rank 0's, including nested units and frozen ones.",
               _started("deep_nest uneven strided", sync_module_states=True),
               _started_frozen(sync_module_states=True)),
    documented("construction.rank_0_buffers",
               "Ranks that start with different buffers, saved or not and of every dtype, get rank 0's.",
               _started("buffers batch_norm", sync_module_states=True)),
    documented("construction.rank_0_without_device", "Ranks get rank 0's parameters and buffers also if no device is named.",
               _started("uneven buffers", sync_module_states=True, settings=("default_device",))),
    documented("construction.meta_parameters",
               "Modules on the meta device are initialised by the user's function, and then train like other modules.",
               _started("deep_nest uneven", meta_init=True), _started_frozen(meta_init=True)),
    documented("construction.meta_buffers", "Buffers on the meta device are initialised with the parameters of their module.",
               _started("batch_norm", meta_init=True)),
    documented("construction.meta_then_rank_0", "Parameters that ranks initialise differently end as rank 0's.",
               _started("deep_nest uneven", meta_init=True, sync_module_states=True)),
    check("training.optimizer_state", "After each step the optimizer state of every parameter equals one process's.",
          cases("uneven", *iteration(0), Observe(), *iteration(1), Observe(), optimizer=ADAMW),
          source="torch.optim.Optimizer.state", needs={"optimizer_pieces"}),
)  # fmt: skip
"""Wrapping, and where the first values come from."""
