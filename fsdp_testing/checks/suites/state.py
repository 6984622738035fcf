"""State: the loaded state equals the saved one, in a fresh instance, another wrapping, another number of ranks.

Loading is judged by what follows: the loaded model has the saved values, and continues training as if it had never been saved.
    The loading instance was built from other values, so nothing comes from its construction. Across numbers
of ranks several worlds follow one another: each loads what the one before it saved and runs the case's program on the inputs of
its own ranks. The oracle does the same with one model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.operations import Operation, Restore, Save, TrainElsewhere
from fsdp_testing.cases.operations.reloading import ELSEWHERE
from fsdp_testing.cases.records import (
    Batch,
    Case,
    MixedPrecisionSpec,
    Observe,
    OptimizerSpec,
    RankObservation,
    Reload,
    SetLr,
    Step,
    Tally,
    Verdict,
    WrappingPlan,
)
from fsdp_testing.checks.suites.check import (
    ADAMW,
    LOCKSTEP,
    ODD,
    PLAIN_SGD,
    Check,
    cases,
    check,
    forward,
    iteration,
    iterations,
    micro_batch,
)
from fsdp_testing.checks.suites.state_programs import (
    GROUPED,
    OF_ANOTHER_MODEL,
    OF_ANOTHER_RANK,
    REFUSED,
    REFUSED_OPTIMIZER,
    REORDERED,
    SHARDS_PLACED,
    STORED_DTYPES,
    WRONG_IN_SHARDS,
    WRONG_OPTIMIZERS,
    WRONG_RAW,
    WRONG_STATES,
    through_directory,
)
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase, RunMode
from fsdp_testing.oracle import oracle, rank_jobs
from fsdp_testing.oracle.disturbance import Disturbance
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.one_process import Saved
from fsdp_testing.oracle.quantities import Comparison, Expectation
from fsdp_testing.oracle.replay import Replay


@dataclass(frozen=True, slots=True)
class SavingObservation(RankObservation):
    """A rank's report with its saved state: all ranks have the same state, so only rank 0 sends it."""

    saved: Saved | None = None


def judge_moved(
    runner: CaseRunner, adapter: Adapter, case: Case, comparison: Comparison, *, optimizer: bool = True
) -> JudgedCase:
    """Judge the case on N ranks, then on N+1 from what those saved, then on N from what these saved.

    With T ranks for each model: on N, then on T, then on N/T without tensor parallelism, on one rank, and on N again.
    """
    world, parts = case.world, case.world.tensor_parallel
    sizes = [(world.size, 1), (world.size + 1, 1), (world.size, 1)]
    if parts > 1:
        sizes = [(world.size, parts), (parts, parts), (world.replicas, 1), (1, 1), (world.size, parts)]
    cases: list[Case] = []
    saved: Saved | None = None
    judgements: list[JudgedCase] = []
    for stage, (ranks, parts) in enumerate(sizes):
        # Different inputs in each world: a state that was not loaded must not give the same numbers.
        world = replace(case.world, size=ranks, tensor_parallel=parts)
        moved = [operation.with_batches(partial(_reseeded, 10 * stage)) for operation in case.program]
        cases.append(replace(case, world=world, program=tuple(moved)))
        settings = {"saved": saved, "saves_optimizer": optimizer}
        mode = RunMode(rank_jobs.run_as, (MovingProgram, settings), expect_moved, (tuple(cases[:-1]), optimizer))
        judgements.append(runner.judge(adapter, cases[-1], comparison, mode=mode))
        observed = judgements[-1].ranks
        saved = next((rank.saved for rank in observed if isinstance(rank, SavingObservation) and rank.saved), None)
        # A world without a verdict leaves the whole case without one, even if later worlds hold.
        if judgements[-1].verdict is not Verdict.PASS or saved is None:
            break
    return _merged(judgements)


def _reseeded(offset: int, batch: Batch) -> Batch:
    return replace(batch, seed=batch.seed + offset)


def _merged(judgements: Sequence[JudgedCase]) -> JudgedCase:
    """Return the last world's verdict, with the comparisons of all of them; a world that saved nothing has said so itself."""
    last, outcomes = judgements[-1], [judged.outcome for judged in judgements]
    tally = Tally(sum(o.comparisons for o in outcomes), max(o.worst_ratio for o in outcomes))
    seconds = sum(judged.seconds for judged in judgements)
    return replace(last, judgement=replace(last.judgement, tally=tally), seconds=seconds)


# ----------------------------------------------------------------------------------------------- on the ranks


class MovingProgram(RankProgram):
    """A program that begins with loading, if there is something to load, and ends with saving."""

    saved: Saved | None = None
    saves_optimizer = True

    def run(self, *, observe_all: bool = False) -> RankObservation:
        """Save the model and, if asked, the optimizer, after a run without errors; only rank 0 sends the state."""
        observation = super().run(observe_all=observe_all)
        if observation.error is not None:
            return observation
        state = self._save(self.optimizer if self.saves_optimizer else None)
        return observation.extended(SavingObservation, saved=state if self.rank == 0 else None)

    def _save(self, optimizer: torch.optim.Optimizer | None) -> Saved:
        state = self.adapter.full_state_dict(self.model)
        kept = self.adapter.full_optimizer_state(self.model, optimizer) if optimizer is not None else None
        # Copied: the returned state may be the model's own memory.
        return Saved(copy.deepcopy(dict(state)), copy.deepcopy(kept))

    def build_optimizer(self) -> None:
        """Load the model first: an optimizer may read its parameters."""
        if self.saved is not None:
            with self._inside():
                self.adapter.load_full_state_dict(self.model, self.saved.model)
        super().build_optimizer()
        if self.saved is not None and self.saved.optimizer is not None and self.optimizer is not None:
            with self._inside():
                self.adapter.load_full_optimizer_state(self.model, self.optimizer, self.saved.optimizer)


# ----------------------------------------------------------------------------------------------- in the oracle


class _Continued(Replay):
    """A replay that takes over parameters and optimizer from the one before it."""

    before: Replay | None = None
    with_optimizer = True

    def build_optimizer(self) -> None:
        if self.before is not None:
            for fqn, parameter in self.parameters.items():
                parameter.data.copy_(self.before.parameters[fqn].data)
        super().build_optimizer()
        if not self.with_optimizer or self.before is None:
            return
        if self.optimizer is not None and self.before.optimizer is not None:
            self.optimizer.load_state_dict(copy.deepcopy(self.before.optimizer.state_dict()))


def expect_moved(case: Case, observe_all: bool, earlier: tuple[Case, ...], optimizer: bool) -> Expectation:
    """Replay the earlier cases and then `case`, each from where the one before it ended."""

    def continued(disturbance: Disturbance) -> Replay:
        before: Replay | None = None
        for case_before in earlier:
            replay = _Continued(case_before, disturbance=disturbance)
            replay.before, replay.with_optimizer = before, optimizer
            replay.run()
            before = replay
        last = _Continued(case, disturbance=disturbance)
        last.before, last.with_optimizer = before, optimizer
        return last

    with rank_jobs.no_warnings():
        return oracle.expect_free(case, observe_all=observe_all, make=continued)


_DECAYED = OptimizerSpec("sgd", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1})
_NESTED = {"nested_wrapping"}
_ONE, _ALL = ((True, False, False),), ((True, True, True),)


def _model(form: str, models: str) -> tuple[Case, ...]:
    """Trained, saved and loaded without the optimizer, trained on."""
    program = (*iteration(0), Reload(form, optimizer=False), Observe(), *iteration(1))
    return cases(models, *program, optimizer=PLAIN_SGD)


def _before_training(form: str) -> tuple[Case, ...]:
    return cases("mlp", Reload(form, optimizer=False), Observe(), *iteration(0), optimizer=PLAIN_SGD)


def _rolled_back(
    form: str, models: str, *between: Operation, optimizer: OptimizerSpec | None = None
) -> tuple[Case, ...]:
    """Trained, saved, trained on, loaded into the same model, and trained on from there."""
    program = (
        *iteration(0),
        Save(form, optimizer is not None),
        *iteration(1),
        *between,
        Restore(),
        Observe(),
        *iteration(2),
    )
    return cases(models, *program, optimizer=optimizer or PLAIN_SGD)


def _with_optimizer(form: str, *optimizers: OptimizerSpec) -> tuple[Case, ...]:
    program = (*iterations(2), Reload(form), Observe(), *iterations(2, first=2))
    return tuple(case for optimizer in optimizers for case in cases("uneven", *program, optimizer=optimizer))


def _on_some_ranks(case: Case) -> Case:
    """Return the case with all ranks but one in the other world, under the case's own strategy where that is possible."""
    strategy = case.strategy if case.strategy in ELSEWHERE else "full_shard"
    program = (
        replace(operation, ranks=case.world.size - 1, strategy=strategy)
        if isinstance(operation, TrainElsewhere)
        else operation
        for operation in case.program
    )
    return replace(case, program=tuple(program))


_LOW = (MixedPrecisionSpec("bfloat16"), MixedPrecisionSpec("bfloat16", "float32"), MixedPrecisionSpec(None, "bfloat16"))

saved = partial(check, source="torch.distributed.checkpoint.state_dict")

CHECKS: tuple[Check, ...] = (
    saved("full_state_dict.fresh_instance", "A saved model, loaded into a fresh instance, has its values and trains on.",
          _model("full", "uneven embedding"), sizes=ODD),
    saved("full_state_dict.saved_again", "Each save holds the current values, whatever is frozen.",
          *(cases("mlp", Save(), *iteration(0), Save(), Save(), *iteration(1), Save(), Reload(optimizer=False), Observe(),
                  optimizer=PLAIN_SGD, freeze=freeze) for freeze in ((), ("layers.0.*",)))),
    saved("sharded_state_dict.saved_again", "Loading restores the values that shards held at the second save.",
          *(cases("mlp", Save("sharded"), *iteration(0), *after, Reload("sharded", optimizer=False), Observe(),
                  optimizer=PLAIN_SGD, freeze=freeze)
            for freeze, after in (((), ()), (("layers.0.*",), ()), ((), (forward(5),))))),
    saved("full_state_dict.before_training", "A model can be saved and loaded before its first forward.",
          _before_training("full"), source="pytorch PR 90862"),
    saved("full_state_dict.rolled_back", "Loading a saved model into the model that was trained on since restores it.",
          _rolled_back("full", "uneven buffers"), source="torch.nn.Module.load_state_dict", sizes=ODD),
    saved("full_state_dict.rolled_back_after_evaluation", "State loads into a model that has only run a forward since.",
          _rolled_back("full", "mlp uneven", forward(5)), source="torch.nn.Module.load_state_dict"),
    saved("full_state_dict.buffers", "Buffers are saved and loaded with the parameters, in their dtypes.",
          _model("full", "buffers"), source="pytorch issue 93391"),
    saved("full_state_dict.strict", "A state with a missing parameter, an extra one or one of another shape is "
        "refused.",
          *(cases("mlp", *iteration(0), Observe(wrong)) for wrong in WRONG_STATES),
          source="torch.nn.Module.load_state_dict, strict",
          needs={"full_state_dict", "strict_state"}, mode=REFUSED),
    saved("sharded_state_dict.strict", "A state in shards with a missing or an extra parameter is refused.",
          *(cases("mlp", *iteration(0), Observe(wrong)) for wrong in WRONG_IN_SHARDS),
          source="torch.nn.Module.load_state_dict, strict",
          needs={"sharded_state_dict", "strict_state"}, mode=REFUSED),
    saved("sharded_state_dict.other_shapes", "A state in shards of a model with other shapes is refused.",
          cases("mlp", *iteration(0), Observe(OF_ANOTHER_MODEL["sharded"])),
          source="torch.nn.Module.load_state_dict, strict",
          needs={"sharded_state_dict", "strict_state"}, mode=REFUSED, sizes=ODD),
    saved("local_state_dict.strict", "A raw state with a missing shard, an extra one or shards of other sizes is refused.",
          *(cases("mlp", *iteration(0), Observe(wrong)) for wrong in (*WRONG_RAW, OF_ANOTHER_MODEL["local"])),
          source="torch.nn.Module.load_state_dict, strict",
          needs={"local_state_dict", "strict_state"}, mode=REFUSED, sizes=ODD),
    *(saved(f"{form}_state_dict.of_another_rank", f"A {form} state that another rank saved is refused.",
            cases("mlp", *iteration(0), Observe(OF_ANOTHER_RANK[form])), source="torch.nn.Module.load_state_dict",
            needs={f"{form}_state_dict", "strict_state"}, strategies=("full_shard",), mode=REFUSED, sizes=ODD)
      for form in OF_ANOTHER_RANK),
    *(saved(f"{form}_state_dict.through_directory",
            f"A {form} state that torch.distributed.checkpoint saved and loaded restores the model.",
            cases("uneven", *iteration(0)), needs={f"{form}_state_dict", "full_state_dict"}, mode=through_directory(form),
            sizes=ODD)
      for form in OF_ANOTHER_RANK),
    *(saved(f"{form}_state_dict.one_unit", f"A model that is one unit is saved and loaded in {form} form.",
            cases("uneven", *iterations(2), Reload(form), *iteration(2), wrapping=WrappingPlan()),
            source="torch.nn.Module.load_state_dict", sizes=ODD) for form in ("full", "sharded", "local")),
    saved("full_state_dict.dtypes", "Saved values have the storage dtype of parameters, not the compute dtype.",
          *(cases("mlp uneven", *iteration(0), Save(), micro_batch(1), Save(), dtype="float32", optimizer=PLAIN_SGD,
                  precision=precision) for precision in _LOW),
          source="torch.distributed.fsdp.MixedPrecision", comparison=LOCKSTEP),
    saved("full_state_dict.buffer_dtypes", "Saved buffers have the dtype that they had when the model was built.",
          cases("buffers", *iteration(0), Save(), *iteration(1), dtype="float32", optimizer=PLAIN_SGD,
                precision=MixedPrecisionSpec(buffer_dtype="bfloat16")),
          source="torch.distributed.fsdp.MixedPrecision", comparison=LOCKSTEP),
    saved("full_state_dict.shared_parameters",
          "Parameters under two names, and units under two names, are saved and loaded as one.",
          _model("full", "tied_within registered_twice"), source="pytorch PR 98912, 99448"),
    # To the root alone, and from there to another unit.
    saved("full_state_dict.other_wrapping", "State saved under one wrapping loads under another.",
          cases("mlp", *iteration(0), Reload("full", optimizer=False, units=()), Observe(),
                *iteration(1), Reload("full", optimizer=False, units=("layers.1",)), *iteration(2), optimizer=PLAIN_SGD),
          source="pytorch PR 90933", needs=_NESTED),
    saved("full_state_dict.other_world_size", "State of N ranks loads and trains on N+1 ranks, and then on N ranks again.",
          cases("uneven", *iteration(0), Save(), optimizer=PLAIN_SGD),
          needs={"full_state_dict"}, judge=partial(judge_moved, optimizer=False)),
    saved("sharded_state_dict.fresh_instance",
          "A model saved in shards, loaded into a fresh instance, has its values and trains on.",
          _model("sharded", "mlp uneven"), sizes=ODD),
    saved("sharded_state_dict.before_training", "A model can be saved and loaded in shards before its first forward.",
          _before_training("sharded"), source="pytorch PR 90862"),
    saved("sharded_state_dict.rolled_back",
          "Loading a model saved in shards into the model that was trained on since restores it.",
          _rolled_back("sharded", "mlp uneven"), _rolled_back("sharded", "mlp", forward(5)),
          source="torch.nn.Module.load_state_dict", sizes=ODD),
    *(saved(f"sharded_state_dict.whole{of}", f"Shards of {what} hold the elements that they say they do.",
            cases(model, forward(0, "no_grad")), needs={"full_state_dict", "sharded_state_dict"}, mode=SHARDS_PLACED, sizes=ODD)
      for of, what, model in (("", "parameters", "uneven"), ("_strided", "weights that are not contiguous", "strided"))),
    saved("sharded_state_dict.buffers", "Buffers are saved and loaded with the shards.", _model("sharded", "buffers")),
    saved("local_state_dict.fresh_instance", "Raw shards, loaded on the rank that saved them, restore the model.",
          _model("local", "mlp uneven"), source="torch.distributed.fsdp.LocalStateDictConfig; pytorch PR 94109", sizes=ODD),
    saved("local_state_dict.rolled_back", "Raw shards, loaded into the model that was trained on since, restore it.",
          _rolled_back("local", "mlp uneven"), source="torch.distributed.fsdp.LocalStateDictConfig", sizes=ODD),
    saved("optim_state.rolled_back",
          "Loading model and optimizer into those that were trained on since restores them.",
          _rolled_back("full", "uneven", optimizer=ADAMW), _rolled_back("full", "mlp", SetLr(0.2), optimizer=_DECAYED),
          source="torch.optim.Optimizer.load_state_dict", sizes=ODD),
    saved("optim_state.rolled_back_to_the_start", "Loaded into an optimizer that stepped since, the state of one that never "
        "stepped leaves it none.",
          cases("mlp", Save(optimizer=True), *iterations(2), Restore(), Observe(), *iterations(2, first=2), optimizer=ADAMW),
          source="torch.optim.Optimizer.load_state_dict"),
    saved("optim_state.fresh_instance",
          "Model and optimizer, loaded into fresh instances, continue as if they had never been saved.",
          _with_optimizer("full", ADAMW, _DECAYED), sizes=ODD),
    saved("optim_state.sharded_model", "The same with model and optimizer saved in shards.",
          _with_optimizer("sharded", ADAMW), needs={"full_state_dict"}),
    saved("optim_state.strict", "Optimizer state with a missing parameter, an extra one or moments of another shape is refused.",
          *(cases("mlp", *iteration(0), Observe(wrong), optimizer=ADAMW) for wrong in WRONG_OPTIMIZERS),
          source="torch.optim.Optimizer.load_state_dict", needs={"optim_state"}, mode=REFUSED_OPTIMIZER),
    saved("optim_state.dtypes", "Saved optimizer state has the storage dtype of parameters.",
          *(cases("mlp", *iteration(0), dtype="float32", optimizer=ADAMW, precision=precision) for precision in _LOW),
          source="torch.distributed.fsdp.MixedPrecision", comparison=LOCKSTEP, needs={"optim_state"}, mode=STORED_DTYPES),
    saved("optim_state.groups", "Each group of parameters gets its own settings back, whatever the new optimizer was built with.",
          *(cases("mlp", *iterations(2), Reload(), Observe(), *iterations(2, first=2), optimizer=optimizer)
            for optimizer in (_DECAYED, OptimizerSpec("adamw", {"lr": 0.02, "weight_decay": 0.1}))),
          cases("mlp", *iteration(0), Save(optimizer=True), SetLr(0.3), *iteration(1), Restore(), *iteration(2),
                optimizer=_DECAYED),
          source="torch.optim.Optimizer.load_state_dict", needs={"frozen_mixed_unit"}, mode=GROUPED, by_name=True),
    saved("optim_state.reordered", "State is loaded by parameter name, whatever the order in the new optimizer.",
          cases("mlp uneven", *iterations(2), Reload(), Observe(), *iterations(2, first=2), optimizer=ADAMW),
          needs={"reordered_optimizer"}, mode=REORDERED),
    saved("optim_state.learning_rate", "The learning rate at the time of saving is restored, zero included.",
          cases("mlp", *iteration(0), SetLr(0.2), Reload(), *iterations(2, first=1), SetLr(0.0), Reload(), *iteration(3)),
          source="pytorch PR 128685"),
    saved("optim_state.other_wrapping", "Optimizer state saved under one wrapping loads under another.",
          cases("mlp", *iterations(2), Reload(units=()), Observe(), *iteration(2), Reload(units=("layers.2",)), *iteration(3),
                optimizer=ADAMW), needs=_NESTED),
    saved("optim_state.other_world_size",
          "Optimizer state of N ranks loads and trains on N+1 ranks, and then on N ranks again.",
          cases("uneven", *iteration(0), SetLr(0.02), *iteration(1), Save(optimizer=True), optimizer=ADAMW),
          needs={"full_state_dict", "optim_state"}, judge=judge_moved),
    saved("optim_state.some_ranks",
          "Some of the ranks load and train the state of all ranks; then all ranks load theirs.",
          *(cases("uneven", *iterations(2), TrainElsewhere(Batch(7), 1, last), Observe(), Save(optimizer=True), *iteration(2),
                  optimizer=ADAMW) for last in (False, True)),
          needs={"full_state_dict", "optim_state", "sub_groups"}, fit=_on_some_ranks),
    saved("optim_state.before_first_step",
          "An optimizer that never stepped can be saved and loaded; its step counts start at zero, and its rate stays.",
          cases("mlp", Reload(), Observe(), *iterations(2), optimizer=ADAMW),
          cases("mlp", Save(optimizer=True), Observe(), *iteration(0), optimizer=PLAIN_SGD),
          source="torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"),
    saved("optim_state.partly_stepped", "State of parameters that were never stepped, which is none, is saved and loaded.",
          *(cases("conditional", *iteration(0, usage=_ONE), *save, *iteration(1, usage=_ONE), Restore(), Observe(),
                  *iterations(2, first=2, usage=_ALL), wrapping=wrapping, optimizer=ADAMW)
            for save, wrapping in (((Save(optimizer=True),), WrappingPlan()), ((Reload(), Save(optimizer=True)), None))),
          source="torch.optim.Optimizer.state", needs={"unused_gradient_is_none"}),
    saved("optim_state.without_state", "An optimizer that keeps no state can be saved and loaded, with its learning rate.",
          cases("mlp", *iteration(0), SetLr(0.02), Reload(), *iteration(1), optimizer=PLAIN_SGD),
          source="torch.optim.SGD without momentum"),
    saved("optim_state.repeatedly", "Saving and loading after every step does not change training.",
          cases("mlp", *iteration(0), Reload(), *iteration(1), Reload(), micro_batch(2), Step(), forward(3), optimizer=ADAMW)),
    saved("optim_state.frozen_parameters", "Frozen parameters have no optimizer state, and loading gives them none.",
          cases("frozen_body", *iterations(2), Reload(), Observe(), *iteration(2), optimizer=ADAMW),
          source="pytorch PR 76671"),
    saved("optim_state.strided_parameters", "Loaded state belongs to the same elements, whatever the strides of a weight.",
          cases("strided", *iterations(2), Reload(), Observe(), *iteration(2), optimizer=ADAMW),
          source="https://github.com/NVIDIA/physicsnemo/pull/1597"),
    saved("optim_state.shared_parameters", "A shared parameter has one optimizer state.",
          cases("tied_within", *iterations(2), Reload(), Observe(), *iteration(2), optimizer=ADAMW),
          source="pytorch issue 128011, PR 128685"),
)  # fmt: skip
"""Model and optimizer, whole, in shards and raw."""
