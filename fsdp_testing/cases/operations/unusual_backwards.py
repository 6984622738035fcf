"""Micro-batches other than one forward through the wrapper and one backward of its loss, or that the user's code interrupts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_testing.cases.operations import user_code
from fsdp_testing.cases.operations.micro_batches import Forward, ForwardBackward, TrainingPass
from fsdp_testing.cases.operations.operation import Batch, Operation
from fsdp_testing.cases.operations.optimizing import Step
from fsdp_testing.cases.operations.user_code import expect_refusal
from fsdp_testing.errors import InvalidRecord

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdp_testing.cases.drawing.normal_form import ProgramContext
    from fsdp_testing.cases.drawing.operation_drawer import OperationDrawer
    from fsdp_testing.oracle.execute import RankProgram, Values
    from fsdp_testing.oracle.replay import Replay, Results

PLACES = ("step", "no_sync", "summon")


class Interruption(Exception):
    """What the user's own code raises in an `Interrupt`."""


@dataclass(frozen=True, slots=True)
class Interrupt(Operation):
    """The user's own code raises on every rank, in a forward or in its backward; then gradients are cleared, unless told.

    Attributes:
        batch: Inputs; every rank uses the same branches, otherwise the user's own code would make the ranks differ.
        place: The module without children that raises, counted in module order and wrapped around.
        backward: It raises when the gradient of its output is known, instead of before its forward.
        where: In an ordinary `step`, in one inside `no_sync`, or in an open `summon` (then no forward runs at all).
        keeps_gradients: The user leaves the gradients of earlier micro-batches as they are; only after a forward in a `step`.
    """

    kind = "interrupt"
    needs = frozenset({"exception_recovery"})
    passes = None
    features = {"op.interrupt": ("exception_recovery",)}
    batch: Batch
    place: int = 0
    backward: bool = False
    where: str = "step"
    keeps_gradients: bool = False

    def __post_init__(self) -> None:
        if self.keeps_gradients and (self.backward or self.where != "step"):
            raise InvalidRecord(
                "Interrupt.keeps_gradients: expected False except in a step's forward, got True. Clear them."
            )
        if self.where not in PLACES:
            raise InvalidRecord(f"Interrupt.where: expected one of {PLACES}, got {self.where!r}. Choose one of them.")

    def required(self) -> frozenset[str]:
        inside = {"no_sync": {"no_sync"}, "summon": {"summon_writeback"}}.get(self.where, set())
        return Interrupt.needs | self.batch.required() | inside

    def pending_after(self, pending: bool) -> bool:
        return pending and self.keeps_gradients

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
        yield replace(self, keeps_gradients=False)

    def may_stay_unsharded(self, before: frozenset[str], *, frees_early: bool, backward: bool) -> frozenset[str] | None:
        return None  # units gathered when the user's code raises are released when the model next runs

    def token(self) -> str:
        where = "" if self.where == "step" else f",{self.where}"
        return f"{self.kind}[{'backward' if self.backward else 'forward'}{where}]"

    def run(self, program: RankProgram) -> None:
        raised: list[Interruption] = []
        try:
            self._interrupted(program, raised)
        except Interruption:
            raised.clear()
        user_code.expect_nothing_held_back(raised)
        program.adapter.recover(program.model)
        if not self.keeps_gradients:
            program.zero_grad(set_to_none=True)

    def _interrupted(self, program: RankProgram, raised: list[Interruption]) -> None:
        if self.where == "summon":
            with program.adapter.full_parameters(program.model, writeback=True):
                raised.append(Interruption("the user's own code raises"))
                raise raised[0]
            return
        with program.adapter.no_sync(program.model) if self.where == "no_sync" else nullcontext():
            handle = self._raise_in(program.model, raised)
            try:
                program.backward(program.call(self.batch).loss)
            finally:
                handle.remove()

    def replay(self, replay: Replay) -> None:
        replay.refresh()
        for rank, replica in enumerate(replay.replicas if self.where != "summon" else ()):
            # An interrupted forward has run up to there: buffers may have changed. The backward changes none.
            handle = None if self.backward else self._raise_in(replica, [])
            with suppress(Interruption):
                replay.interrupted(rank, self.batch)  # nothing raises if this batch skips the chosen module
            if handle is not None:
                handle.remove()
        if not self.keeps_gradients:
            replay.clear_gradients()

    def _raise_in(self, model: nn.Module, raised: list[Interruption]) -> Any:
        """Make one module of `model` raise, and return the handle that ends it. Wrappers have children: they never count."""

        def fail(*_: object) -> None:
            raised.append(Interruption("the user's own code raises"))
            raise raised[-1]

        def fail_in_backward(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if getattr(output, "requires_grad", False):
                output.register_hook(fail)

        leaves = [module for module in model.modules() if next(module.children(), None) is None]
        chosen = leaves[self.place % len(leaves)]
        if self.backward:
            return chosen.register_forward_hook(fail_in_backward)
        return chosen.register_forward_pre_hook(fail)


def _gradients_of(leaves: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return what a backward left in inputs, by name."""
    gradients = (leaf.grad for leaf in leaves)
    return {f"input_gradient.{at}": grad.detach().clone() for at, grad in enumerate(gradients) if grad is not None}


FORMS: Mapping[str, str] = {
    "twice": "backward_twice",
    "penalty": "second_order",
    "after_no_sync": "backward_after_no_sync",
    "inner": "inner_forward",
    "outdated": "outdated_backward",
    "inputs": "backward_inputs",
    "one_input": "backward_inputs",
    "of_inputs": "input_gradients",
    "evaluated": "forward_only",
}
"""Form of a backward -> the capability that it needs. Those with a feature are drawn."""

_CHOOSING = {"inputs", "one_input"}


@dataclass(frozen=True, slots=True)
class UnusualBackward(TrainingPass):
    """A micro-batch whose gradients are reduced.

    Attributes:
        batch: Inputs.
        form: `twice`: two backwards through one graph, which is kept for the second. `penalty`: the squared gradient by
            the inputs is part of the loss. `after_no_sync`: forward inside `no_sync`, backward outside of it. `inner`:
            forward of the module inside the wrapper, where the wrapper is a module around it. `outdated`: between forward and
            backward the optimizer steps by gradients from before, so that backward must be refused; then they are cleared.
            `inputs`: `backward(inputs=...)` names all trained parameters. `one_input`: it names the first in the alphabet.
            `of_inputs`: the inputs ask for gradients, which are this rank's own. `evaluated`: between forward and backward
            runs a forward under no_grad.
    """

    kind = "unusual_backward"
    features = {
        "op.backward_twice": ("backward_twice", "accumulate_without_no_sync"),
        "op.penalty": ("second_order",),
        "op.after_no_sync": ("backward_after_no_sync", "no_sync"),
        "op.inner": ("inner_forward",),
    }
    batch: Batch
    form: str

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise InvalidRecord(f"UnusualBackward.form: expected one of {tuple(FORMS)}, got {self.form!r}. Choose one.")

    def required(self) -> frozenset[str]:
        return self.batch.required() | {FORMS[self.form]} | ({"no_sync"} if self.form == "after_no_sync" else set())

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> UnusualBackward:
        batch = drawer.batch()
        return cls(batch, drawer.pick_by_feature(dict(zip(cls.features, FORMS))))

    def normalise(self, context: ProgramContext) -> Operation | None:
        # Second derivatives are rounded at casts, whose places differ between implementations.
        return (
            ForwardBackward(self.batch) if self.form in ("penalty", "of_inputs") and context.mixed_precision else self
        )

    def simpler(self) -> Iterator[Operation]:
        yield ForwardBackward(self.batch)
        for batch in self.batch.simpler():
            yield replace(self, batch=batch)

    def most_passes(self, uses: int, *, frees_early: bool) -> int | None:
        return None

    def may_stay_unsharded(self, before: frozenset[str], *, frees_early: bool, backward: bool) -> frozenset[str] | None:
        if self.form == "outdated":
            return None  # units gathered when backward is refused are released when the model next runs
        return TrainingPass.may_stay_unsharded(self, before, frees_early=frees_early, backward=backward)

    def token(self) -> str:
        return f"{self.kind}[{self.form}]"

    def words(self) -> str:
        return f"forward-backward ({self.form})"

    def run(self, program: RankProgram) -> Values:
        leaves: list[Tensor] | None = [] if self.form == "of_inputs" else None
        if self.form == "after_no_sync":
            with program.adapter.no_sync(program.model):
                forwarded = program.call(self.batch)
        else:
            kinds = {"inner": self.form == "inner", "penalised": self.form == "penalty"}
            forwarded = program.call(self.batch, **kinds, leaves=leaves)
        values = forwarded.values()
        if self.form == "of_inputs":
            program.backward(forwarded.loss)
            return values | _gradients_of(leaves or ())
        if self.form == "outdated":
            self._refused(program, forwarded.loss)
            return values
        if self.form == "evaluated":
            Forward(replace(self.batch, seed=self.batch.seed + 1), "no_grad").run(program)
        if self.form in _CHOOSING:
            self._chosen(program, forwarded.loss)
            return values
        if self.form == "twice" and forwarded.loss.requires_grad:
            forwarded.loss.backward(retain_graph=True)
        program.backward(forwarded.loss)
        return values

    def _refused(self, program: RankProgram, loss: Tensor) -> None:
        Step().run(program)
        expect_refusal(lambda: program.backward(loss))
        program.zero_grad(set_to_none=True)

    def _chosen(self, program: RankProgram, loss: Tensor) -> None:
        named = dict(program.adapter.named_parameters(program.model))
        chosen = self._choice(named)
        if chosen and loss.requires_grad:
            loss.backward(inputs=[named[fqn] for fqn in chosen])

    def _choice(self, named: Mapping[str, nn.Parameter]) -> list[str]:
        trained = sorted(fqn for fqn, parameter in named.items() if parameter.requires_grad)
        return trained[:1] if self.form == "one_input" else trained

    def replay(self, replay: Replay) -> Results:
        import torch

        replay.refresh()
        values: Results = {}
        ranks = []
        if self.form == "outdated":
            for rank in range(replay.size):
                values |= replay.results(rank, replay.forward(rank, self.batch))
            Step().replay(replay)
            replay.clear_gradients()
            return values
        for rank in range(replay.size):
            leaves: list[Tensor] | None = [] if self.form == "of_inputs" else None
            penalised = self.form == "penalty"
            forwarded, gradients = replay.local_gradients(rank, self.batch, penalised=penalised, leaves=leaves)
            values |= replay.results(rank, forwarded)
            for name, gradient in _gradients_of(leaves or ()).items():
                # Casts of inputs are the wrapper's: the user's tensors have the dtype of the model as it is stored.
                values |= replay.result(rank, name, gradient.to(getattr(torch, replay.case.model.dtype)))
            if self.form in _CHOOSING:
                gradients = gradients.only(self._choice(replay.parameters))
            ranks.append(gradients)
        for _ in range(2 if self.form == "twice" else 1):
            replay.begin_micro_batch()
            for rank, gradients in enumerate(ranks):
                replay.accumulate(rank, gradients)
            replay.reduce_pending()
        return values
