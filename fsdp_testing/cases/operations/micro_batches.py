"""Forward and backward: the operations that run micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from fsdp_testing.base.document import ADDED_LATER
from fsdp_testing.cases.operations.operation import Batch, Operation
from fsdp_testing.errors import InvalidRecord

if TYPE_CHECKING:
    from fsdp_testing.cases.drawing.features import Swarm
    from fsdp_testing.cases.drawing.normal_form import ProgramContext
    from fsdp_testing.cases.drawing.operation_drawer import OperationDrawer
    from fsdp_testing.oracle.execute import RankProgram, Values
    from fsdp_testing.oracle.reduction import LocalGradients
    from fsdp_testing.oracle.replay import Replay, Results

FORWARD_MODES = ("train", "eval", "no_grad", "inference")


class ForwardPass(Operation):
    """An operation that runs one forward of each of its micro-batches."""

    __slots__ = ()
    passes = 0

    def most_passes(self, uses: int, *, frees_early: bool) -> int | None:
        # A unit that runs several times may be freed and gathered again each time, in forward and in backward.
        return uses * len(self.batches())

    def may_stay_unsharded(self, before: frozenset[str], *, frees_early: bool, backward: bool) -> frozenset[str] | None:
        # The root (empty name) ends forward last and begins backward first: it may stay gathered with every strategy.
        return before | {""} if frees_early else None


class TrainingPass(ForwardPass):
    """An operation that runs one forward and one backward of each of its micro-batches, and reduces the gradients."""

    __slots__ = ()
    runs_backward = True

    def without_rank(self, rank: int, size: int) -> Operation:
        return self.with_batches(lambda batch: batch.without_rank(rank, size))

    def pending_after(self, pending: bool) -> bool:
        return False

    def most_passes(self, uses: int, *, frees_early: bool) -> int | None:
        return uses * len(self.batches()) * (1 + frees_early)

    def most_reductions(self, uses: int) -> int:
        return uses * len(self.batches())

    def may_stay_unsharded(self, before: frozenset[str], *, frees_early: bool, backward: bool) -> frozenset[str] | None:
        if backward:
            return frozenset()
        return ForwardPass.may_stay_unsharded(self, before, frees_early=frees_early, backward=backward)


@dataclass(frozen=True, slots=True)
class ForwardBackward(TrainingPass):
    """Forward in training mode, loss, backward; inside `no_sync` the gradients stay local."""

    kind = "forward_backward"
    features = {"op.no_sync": ("no_sync",)}
    batch: Batch
    no_sync: bool = False

    def required(self) -> frozenset[str]:
        return self.batch.required() | ({"no_sync"} if self.no_sync else frozenset())

    def pending_after(self, pending: bool) -> bool:
        return self.no_sync

    @classmethod
    def weight(cls, swarm: Swarm) -> int:
        return 5

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> ForwardBackward:
        return cls(drawer.batch(), no_sync="op.no_sync" in drawer.swarm and drawer.choices.chance(3))

    def simpler(self) -> Iterator[Operation]:
        for batch in self.batch.simpler():
            yield replace(self, batch=batch)
        if self.no_sync:
            yield replace(self, no_sync=False)

    def most_reductions(self, uses: int) -> int:
        return 0 if self.no_sync else uses

    def may_stay_unsharded(self, before: frozenset[str], *, frees_early: bool, backward: bool) -> frozenset[str] | None:
        if self.no_sync and backward and not frees_early:
            # While gradients await reduction, only a strategy that frees after forward reshards parameters.
            return None
        return TrainingPass.may_stay_unsharded(self, before, frees_early=frees_early, backward=backward)

    def token(self) -> str:
        return f"{self.kind}[no_sync]" if self.no_sync else self.kind

    def words(self) -> str:
        return "forward-backward in no_sync" if self.no_sync else "forward-backward"

    def script_lines(self, name: str) -> list[str] | None:
        sync = ", sync=False" if self.no_sync else ""
        return [f"yield {name!r}, one.forward_backward({self.batch.script_arguments()}{sync})"]

    def run(self, program: RankProgram) -> Values:
        with program.adapter.no_sync(program.model) if self.no_sync else nullcontext():
            forwarded = program.call(self.batch)
            values = forwarded.values()
            program.backward(forwarded.loss)
        return values

    def replay(self, replay: Replay) -> Results:
        replay.refresh()
        values: Results = {}
        replay.begin_micro_batch()
        for rank in range(replay.size):
            forwarded, gradients = replay.local_gradients(rank, self.batch)
            values |= replay.results(rank, forwarded)
            replay.accumulate(rank, gradients)
        if not self.no_sync:
            replay.reduce_pending()
        return values


@dataclass(frozen=True, slots=True)
class Forward(ForwardPass):
    """Forward whose output is compared and dropped: no backward follows."""

    kind = "forward"
    needs = frozenset({"forward_only"})
    features = {
        "op.forward": ("forward_only",),
        "op.eval": ("forward_only",),
        "op.no_grad": ("forward_only",),
        "op.inference": ("forward_only", "inference_mode"),
    }
    share = 2
    runs_forward_alone = True
    batch: Batch
    mode: str = "train"

    def __post_init__(self) -> None:
        if self.mode not in FORWARD_MODES:
            raise InvalidRecord(
                f"Forward.mode: expected one of {FORWARD_MODES}, got {self.mode!r}. Choose one of them."
            )

    def required(self) -> frozenset[str]:
        inference = {"inference_mode"} if self.mode == "inference" else frozenset()
        return Forward.needs | self.batch.required() | inference

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> Forward:
        batch = drawer.batch()
        return cls(batch, drawer.pick_by_feature(dict(zip(cls.features, FORWARD_MODES))))

    def simpler(self) -> Iterator[Operation]:
        for batch in self.batch.simpler():
            yield replace(self, batch=batch)
        yield ForwardBackward(self.batch)
        for mode in FORWARD_MODES[: FORWARD_MODES.index(self.mode)]:
            yield replace(self, mode=mode)

    def other_settings(self) -> Iterator[tuple[str, Operation]]:
        return (("mode", replace(self, mode=mode)) for mode in ("train", "eval") if mode != self.mode)

    def token(self) -> str:
        return f"{self.kind}[{self.mode}]"

    def words(self) -> str:
        return f"{self.mode}-forward"

    def script_lines(self, name: str) -> list[str] | None:
        return [f"yield {name!r}, one.only_forward({self.batch.script_arguments()}, {self.mode!r})"]

    def run(self, program: RankProgram) -> Values:
        program.model.train(self.mode == "train")
        try:
            with self._gradient_mode():
                return program.call(self.batch).values()
        finally:
            program.model.train()

    def replay(self, replay: Replay) -> Results:
        replay.refresh()
        values: Results = {}
        # Between operations all are in training mode; ranks may share one.
        evaluating = [] if self.mode == "train" else list(dict.fromkeys(replay.replicas))
        for replica in evaluating:
            replica.eval()
        for rank in range(replay.size):
            with self._gradient_mode():
                values |= replay.results(rank, replay.forward(rank, self.batch))
        for replica in evaluating:
            replica.train()
        return values

    def _gradient_mode(self) -> AbstractContextManager[object]:
        import torch

        contexts = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        return contexts.get(self.mode, nullcontext)()


@dataclass(frozen=True, slots=True)
class SeveralMicroBatches(TrainingPass):
    """An operation of several micro-batches."""

    micro_batches: tuple[Batch, ...]

    def __post_init__(self) -> None:
        if not self.micro_batches:
            name = type(self).__name__
            raise InvalidRecord(f"{name}.micro_batches: expected at least one, got none. Give a batch.")

    def batches(self) -> tuple[Batch, ...]:
        return self.micro_batches


def _several(drawer: OperationDrawer) -> tuple[Batch, ...]:
    return tuple(drawer.batch() for _ in range(drawer.choices.integer(2, 3)))


@dataclass(frozen=True, slots=True)
class SeveralForwards(SeveralMicroBatches):
    """Several forwards, then as many backwards, in the order of the forwards or in the reverse one."""

    kind = "several_forwards"
    needs = frozenset({"several_forwards", "accumulate_without_no_sync"})
    features = {"op.several_forwards": ("several_forwards", "accumulate_without_no_sync")}
    reverse: bool = False

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> Self:
        return cls(_several(drawer), drawer.choices.chance(2))

    def normalise(self, context: ProgramContext) -> Operation | None:
        # One process refuses it too: the second forward changes what the first backward reads.
        return ForwardBackward(self.micro_batches[0]) if context.edits_in_forward else self

    def simpler(self) -> Iterator[Operation]:
        yield ForwardBackward(self.micro_batches[0])
        yield replace(self, micro_batches=self.micro_batches[:2], reverse=False)
        yield replace(self, micro_batches=tuple(batch.plain() for batch in self.micro_batches))

    def most_passes(self, uses: int, *, frees_early: bool) -> int | None:
        # With every strategy the first backward frees what the next one needs.
        return uses * len(self.micro_batches) * 2

    def _backwards(self) -> list[int]:
        places = list(range(len(self.micro_batches)))
        return places[::-1] if self.reverse else places

    def run(self, program: RankProgram) -> Values:
        done = [program.call(batch) for batch in self.micro_batches]
        values = {f"{name}.{place}": value for place, one in enumerate(done) for name, value in one.values().items()}
        for place in self._backwards():
            program.backward(done[place].loss)
        return values

    def replay(self, replay: Replay) -> Results:
        replay.refresh()
        values: Results = {}
        gradients: list[list[LocalGradients]] = []
        for place, batch in enumerate(self.micro_batches):
            gradients.append([])
            for rank in range(replay.size):
                forwarded, own = replay.local_gradients(rank, batch)
                gradients[place].append(own)
                values |= replay.results(rank, forwarded, f".{place}")
        for place in self._backwards():
            replay.begin_micro_batch()
            for rank, own in enumerate(gradients[place]):
                replay.accumulate(rank, own)
            replay.reduce_pending()
        return values


@dataclass(frozen=True, slots=True)
class LocalMicroBatches(SeveralMicroBatches):
    """Several micro-batches inside one `no_sync`, as in hand-written accumulation; their gradients stay local.

    Attributes:
        micro_batches: One for each micro-batch.
        nested: Each except the last is inside its own inner `no_sync`, whose end must change nothing.
    """

    kind = "local_micro_batches"
    needs = frozenset({"no_sync"})
    features = {"op.local_micro_batches": ("no_sync",)}
    nested: bool = field(default=False, metadata=ADDED_LATER)

    def token(self) -> str:
        return f"{self.kind}[nested]" if self.nested else self.kind

    def pending_after(self, pending: bool) -> bool:
        return True

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> Self:
        return cls(_several(drawer))

    def simpler(self) -> Iterator[Operation]:
        yield ForwardBackward(self.micro_batches[0], no_sync=True)
        yield replace(self, micro_batches=self.micro_batches[:2])
        yield replace(self, micro_batches=tuple(batch.plain() for batch in self.micro_batches))
        yield replace(self, nested=False)

    def most_reductions(self, uses: int) -> int:
        return 0

    def may_stay_unsharded(self, before: frozenset[str], *, frees_early: bool, backward: bool) -> frozenset[str] | None:
        local = ForwardBackward(self.micro_batches[0], no_sync=True)
        return local.may_stay_unsharded(before, frees_early=frees_early, backward=backward)

    def run(self, program: RankProgram) -> Values:
        values: Values = {}
        with program.adapter.no_sync(program.model):
            for place, batch in enumerate(self.micro_batches):
                inner = self.nested and place + 1 < len(self.micro_batches)
                with program.adapter.no_sync(program.model) if inner else nullcontext():
                    forwarded = program.call(batch)
                    values |= {f"{name}.{place}": value for name, value in forwarded.values().items()}
                    program.backward(forwarded.loss)
        return values

    def replay(self, replay: Replay) -> Results:
        values: Results = {}
        for place, batch in enumerate(self.micro_batches):
            given = ForwardBackward(batch, no_sync=True).replay(replay)
            values |= {quantity._replace(name=f"{quantity.name}.{place}"): value for quantity, value in given.items()}
        return values
