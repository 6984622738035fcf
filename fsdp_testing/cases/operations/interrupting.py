"""Exceptions of the user's own code in the middle of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_testing.cases.operations.operation import Batch, Operation
from fsdp_testing.errors import InvalidRecord

if TYPE_CHECKING:
    from torch import nn

    from fsdp_testing.cases.drawing.normal_form import ProgramContext
    from fsdp_testing.cases.drawing.operation_drawer import OperationDrawer
    from fsdp_testing.oracle.execute import RankProgram
    from fsdp_testing.oracle.replay import Replay

PLACES = ("step", "no_sync", "summon")


class Interruption(Exception):
    """What the user's own code raises in an `Interrupt`."""


@dataclass(frozen=True, slots=True)
class Interrupt(Operation):
    """The user's own code raises on every rank, in a forward or in its backward; then gradients are cleared.

    Attributes:
        batch: Inputs; every rank uses the same branches, else the ranks would part by the user's own doing.
        place: Which module without children raises, counted in module order and wrapped around.
        backward: It raises when the gradient of its output is known, instead of before its forward.
        where: In an ordinary `step`, in one inside `no_sync`, or in an open `summon` (then no forward runs at all).
    """

    kind: ClassVar[str] = "interrupt"
    needs: ClassVar[frozenset[str]] = frozenset({"exception_recovery"})
    passes: ClassVar[int | None] = None
    features: ClassVar[Mapping[str, tuple[str, ...]]] = {"op.interrupt": ("exception_recovery",)}
    batch: Batch
    place: int = 0
    backward: bool = False
    where: str = "step"

    def __post_init__(self) -> None:
        if self.where not in PLACES:
            raise InvalidRecord(f"Interrupt.where: expected one of {PLACES}, got {self.where!r}. Choose one of them.")

    def required(self) -> frozenset[str]:
        inside = {"no_sync": {"no_sync"}, "summon": {"summon_writeback"}}.get(self.where, set())
        return Interrupt.needs | self.batch.required() | inside

    def pending_after(self, pending: bool) -> bool:
        return False

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> Interrupt:
        choices = drawer.choices
        features = {"no_sync": "op.no_sync", "summon": "op.edit"}
        places = [place for place in PLACES if place == "step" or features[place] in drawer.swarm]
        return cls(drawer.batch(), choices.integer(0, 5), choices.chance(2), choices.pick(places))

    def normalise(self, context: ProgramContext) -> Operation | None:
        return replace(self, batch=replace(self.batch, usage=self.batch.usage[:1]))

    def simpler(self) -> Iterator[Operation]:
        yield Interrupt(self.batch.plain())
        yield replace(self, place=0)
        yield replace(self, backward=False)

    def may_stay_unsharded(self, before: frozenset[str], *, frees_early: bool, backward: bool) -> frozenset[str] | None:
        return None  # what is open when the user's code raises is given back when it next runs

    def token(self) -> str:
        where = "" if self.where == "step" else f",{self.where}"
        return f"{self.kind}[{'backward' if self.backward else 'forward'}{where}]"

    def run(self, program: RankProgram) -> None:
        with suppress(Interruption):
            if self.where == "summon":
                with program.adapter.full_parameters(program.model, writeback=True):
                    raise Interruption("the user's own code raises")
            with program.adapter.no_sync(program.model) if self.where == "no_sync" else nullcontext():
                handle = self._raise_in(program.model)
                try:
                    program.backward(program.call(self.batch).loss)
                finally:
                    handle.remove()
        program.zero_grad(set_to_none=True)

    def replay(self, replay: Replay) -> None:
        replay.refresh()
        for rank, replica in enumerate(replay.replicas if self.where != "summon" else ()):
            # A forward that is interrupted has computed up to there: buffers may have changed. The backward changes none.
            handle = None if self.backward else self._raise_in(replica)
            with suppress(Interruption):
                (replay.interrupted if self.backward else replay.forward)(rank, self.batch)
            if handle is not None:
                handle.remove()
        replay.clear_gradients()

    def _raise_in(self, model: nn.Module) -> Any:
        """Make one module of `model` raise, and return the handle that ends it. Wrappers have children: they never count."""

        def fail(*_: object) -> None:
            raise Interruption("the user's own code raises")

        def fail_in_backward(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if getattr(output, "requires_grad", False):
                output.register_hook(fail)

        leaves = [module for module in model.modules() if next(module.children(), None) is None]
        chosen = leaves[self.place % len(leaves)]
        if self.backward:
            return chosen.register_forward_hook(fail_in_backward)
        return chosen.register_forward_pre_hook(fail)
