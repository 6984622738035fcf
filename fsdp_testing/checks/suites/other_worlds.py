"""Worlds of other sizes that follow one another: each loads what the one before it saved, and runs the case's program.

The inputs are those of its own ranks. The oracle does the same with one model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.records import Batch, Case, RankObservation, Tally, Verdict
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
