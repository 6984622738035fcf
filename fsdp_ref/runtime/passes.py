"""Where does one unit stand in forward and backward?

What changes while passes run, apart from what a unit is (``unit``). Every attribute has one writer here.
"""

from __future__ import annotations

from fsdp_ref.states import HandleTrainingState, TrainingState


class UnitPasses:
    """The progress of one unit.

    Attributes:
        training_state: what the unit is busy with.
        phase: which phase of a pass it is in.
        depth: forward calls that are open now (a module may call itself).
        entered_backward: the unit's backward has begun and not ended.
        backward_task: the backward pass it began in, -1 for none.
        needs_pre_backward: an output of the latest forward may be differentiated.
        prefetched: full parameters were asked for ahead of need.
        keep_unsharded: full parameters stay through the next forward (after a backward without synchronisation).
        early: the user started a gather that forward must not repeat.
    """

    def __init__(self) -> None:
        self.training_state = TrainingState.IDLE
        self.phase = HandleTrainingState.IDLE
        self.depth = 0
        self.entered_backward = False
        self.backward_task = -1
        self.needs_pre_backward = False
        self.prefetched = False
        self.keep_unsharded = False
        self.early = False

    def open_call(self) -> None:
        """A forward call begins."""
        self.depth += 1

    def begin_forward(self) -> None:
        """The unit itself is about to compute."""
        self.training_state = TrainingState.FORWARD_BACKWARD
        self.phase = HandleTrainingState.FORWARD

    def close_call(self) -> None:
        """A forward call ended, whatever way; the outermost one ends the unit's forward."""
        self.depth -= 1
        if not self.depth:
            self.training_state = TrainingState.IDLE
            self.phase = HandleTrainingState.BACKWARD_PRE if self.entered_backward else HandleTrainingState.IDLE

    def new_round(self) -> None:
        """A new forward of the whole tree begins: nothing is asked for and no backward is under way."""
        self.prefetched = False
        self.end_backward()

    def expect_backward(self) -> None:
        """An output of this forward may be differentiated."""
        self.needs_pre_backward = True

    def begin_backward(self, task: int) -> None:
        """The unit's backward begins in the pass ``task``."""
        self.entered_backward = True
        self.backward_task = task
        self.phase = HandleTrainingState.BACKWARD_PRE

    def end_backward(self) -> None:
        """The unit's backward ended (it may begin again in the same pass)."""
        self.entered_backward = False
        self.needs_pre_backward = False
        self.backward_task = -1

    def phase_is(self, phase: HandleTrainingState) -> None:
        """Note which phase the unit is in."""
        self.phase = phase

    def keep(self, wanted: bool) -> None:
        """Let full parameters stay through the next forward."""
        self.keep_unsharded = wanted

    def mark_early(self) -> None:
        """The user started the gather."""
        self.early = True

    def begin_summon(self) -> None:
        """A user takes hold of the full parameters."""
        self.training_state = TrainingState.SUMMON_FULL_PARAMS
        self.phase = HandleTrainingState.SUMMON_FULL_PARAMS

    def be_idle(self) -> None:
        """Whatever ran is over: the user let go of full parameters, or a pass failed."""
        self.training_state = TrainingState.IDLE
        self.phase = HandleTrainingState.IDLE
        self.end_backward()
