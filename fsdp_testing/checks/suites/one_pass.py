"""Programs after which one more micro-batch is looked at: whether it is reduced, computed again, passes NaN on; of two models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import nn

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.cases.records import UNIT_ROUNDOFF, Batch, Case, Interrupt
from fsdp_testing.checks.suites.check import ODD, PLAIN_SGD, Check, cases, check, iteration, no_sync_batch
from fsdp_testing.checks.suites.programs import review_remarks
from fsdp_testing.checks.suites.state_programs import RemarkingProgram
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.oracle import models, rank_jobs
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.ranks.ledger.interception import listen
from fsdp_testing.ranks.ledger.records import Call, GroupIdentity


class StaysLocal(RemarkingProgram):
    """A program after which a micro-batch runs in no_sync, while its collectives are counted."""

    quantity = "no_sync"
    caught = False
    """Whether the user's own code raises in a forward before, in the same no_sync, and goes on."""

    def statements(self) -> Iterator[str]:
        """Yield what it sent; wholly right numbers may hide it, since sums of means are means of sums."""
        sent: set[str] = set()
        one_model = self.case.world.of_one_model(self.rank)

        def note(group: GroupIdentity, call: Call, _site: object) -> None:
            if group.members != one_model and "reduce" in call.what[0] and set(call.what) & set(UNIT_ROUNDOFF):
                sent.add(call.text)

        batch = Batch(11)
        inputs = models.make_inputs(self.case, batch, self.rank)
        after_inner = "after an inner no_sync ended, in the outer one"
        interrupts = {
            "after an exception in a forward in no_sync": Interrupt(Batch(9), 1, keeps_gradients=True),
            "after an exception in a backward in no_sync": Interrupt(Batch(9), 1, backward=True),
        }
        for where in interrupts if self.caught else ("in no_sync", after_inner):
            sent.clear()
            with self._inside(), self.adapter.no_sync(self.model):
                with self.adapter.no_sync(self.model) if where == after_inner else nullcontext():
                    pass
                if self.caught:
                    interrupts[where].run(self)
                loss = models.forward(self.model, self.case, batch, self.rank, inputs).loss
                with listen(note):  # forward may gather by sums
                    self.backward(loss)
            for call in sorted(sent):
                yield f"a micro-batch {where} was reduced: {call}"


class Recomputes(RemarkingProgram):
    """A program after which a micro-batch runs while forwards of the modules that are to be recomputed are counted."""

    quantity = "recomputation"

    def __init__(self, case: Case, adapter: Adapter, rank: int) -> None:
        super().__init__(case, adapter, rank)
        self.ran: Counter[str] = Counter()

    def _setup(self, case: Case, module: nn.Module) -> Setup:
        # In the class: whoever recomputes by calling `module.forward` or `type(module).forward` runs no hook of a user's.
        for name in case.wrapping.checkpointed:
            part = module.get_submodule(name)
            part.__class__ = self._counted(name, type(part))
        return super()._setup(case, module)

    def _counted(self, name: str, of: type[nn.Module]) -> type[nn.Module]:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.ran.update([name])
            return of.forward(module, *args, **kwargs)

        return type(of.__name__, (of,), {"forward": forward})

    def statements(self) -> Iterator[str]:
        """Yield what ran once; numbers are those of a model that is computed once."""
        self.ran.clear()
        batch = Batch(11)
        with self._inside():
            inputs = models.make_inputs(self.case, batch, self.rank)
            self.backward(models.forward(self.model, self.case, batch, self.rank, inputs).loss)
        for name in self.case.wrapping.checkpointed:
            if self.ran[name] < 2:
                yield (
                    f"{name} is to be computed again in backward: expected a forward and another one in a micro-batch, got "
                    f"{self.ran[name]}"
                )


class NotANumber(RemarkingProgram):
    """A program after which a micro-batch runs whose inputs are NaN on the last rank, also in `no_sync` before a sound one."""

    quantity = "gradients"

    def statements(self) -> Iterator[str]:
        """Yield how many elements of the gradients are no NaN, or missing; a mean with NaN is NaN."""
        for local in (False, True) if "no_sync" in self.adapter.capabilities else (False,):
            self.zero_grad(set_to_none=True)
            with self._inside(), self.adapter.no_sync(self.model) if local else nullcontext():
                self._micro_batch(Batch(11), poisoned=self.rank == self.case.world.size - 1)
            if local:
                with self._inside():
                    self._micro_batch(Batch(12), poisoned=False)
            for fqn, pieces in self.adapter.local_pieces(self.model).items():
                held = sum(piece.stop - piece.start for piece in pieces)
                nans = sum(int(piece.grad.isnan().sum()) for piece in pieces if piece.grad is not None)
                if nans < held:
                    poisoned = "the inputs of one rank are NaN" + ", in a local micro-batch" * local
                    yield f"{poisoned}, and {held - nans} elements of the mean gradient of {fqn} are not"
            self.zero_grad(set_to_none=True)

    def _micro_batch(self, batch: Batch, *, poisoned: bool) -> None:
        inputs = models.make_inputs(self.case, batch, self.rank)
        if poisoned:
            args = models.map_tensors(lambda tensor: torch.full_like(tensor, torch.nan), inputs.args)
            inputs = models.Inputs(args, inputs.kwargs)
        self.backward(models.forward(self.model, self.case, batch, self.rank, inputs).loss)


class KeepsGradients(RemarkingProgram):
    """A program after which gradients are cleared to None while a user keeps them, and another micro-batch runs."""

    quantity = "gradients that a user kept"

    def statements(self) -> Iterator[str]:
        """Yield the parameters whose kept gradients have other numbers after it."""
        self.zero_grad(set_to_none=True)
        with self._inside():
            self.backward(self.call(Batch(11)).loss)
        held = [(fqn, piece.grad) for fqn, pieces in self.adapter.local_pieces(self.model).items() for piece in pieces]
        kept = [(fqn, grad, grad.clone()) for fqn, grad in held if grad is not None]
        if not kept:
            yield "are missing: after a backward this rank has none"
        self.zero_grad(set_to_none=True)
        with self._inside():
            self.backward(self.call(Batch(12)).loss)
        changed = [fqn for fqn, grad, before in kept if not torch.equal(grad, before)]
        if changed:
            yield f"have other numbers after zero_grad(set_to_none=True) and the next backward: {', '.join(changed)}"


class OneInputBuffer(RankProgram):
    """A program that copies all its inputs into the same tensors, as a loader into pinned memory does."""

    def __init__(self, case: Case, adapter: Adapter, rank: int) -> None:
        super().__init__(case, adapter, rank)
        self.buffers: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}

    def _inputs_of(self, batch: Any) -> models.Inputs:
        """Return this rank's inputs."""
        inputs, number = super()._inputs_of(batch), count()

        def put(tensor: torch.Tensor) -> torch.Tensor:
            buffer = self.buffers.setdefault((next(number), tensor.shape, tensor.dtype), torch.empty_like(tensor))
            buffer.data.copy_(tensor)  # `.data`: as a loader's write, it raises no version
            return buffer

        return models.Inputs(*models.map_tensors(put, (inputs.args, dict(inputs.kwargs))))


class DrawsNothing(RemarkingProgram):
    """A program after which a micro-batch, a step and clearing leave torch's generator as it was; or saving and loading."""

    quantity = "random numbers"
    saves = False

    def statements(self) -> Iterator[str]:
        """Yield what drew numbers: the model, which is computed whole elsewhere, would drop out others than one process."""
        batch = Batch(11)
        inputs = models.make_inputs(self.case, batch, self.rank)
        with self._inside():
            forwarded = models.forward(self.model, self.case, batch, self.rank, inputs)
        drawn = torch.get_rng_state()
        # As after an unwrapped model: each forward of a case begins with its own seed.
        models.forward(models.build_model(self.case), self.case, batch, self.rank, inputs)
        if not torch.equal(drawn, torch.get_rng_state()):
            yield "forward drew random numbers, though the model draws none"
        parts: dict[str, Callable[[], object]] = {
            "backward": lambda: self.backward(forwarded.loss),
            "step": lambda: self.adapter.step(self.model, self.optimizer),
            "zero_grad": lambda: self.zero_grad(set_to_none=True),
        }
        if self.saves:
            state: dict[str, torch.Tensor] = {}
            parts = {
                "saving": lambda: state.update(self.adapter.full_state_dict(self.model)),
                "loading": lambda: self.adapter.load_full_state_dict(self.model, dict(state)),
            }
        for name, part in parts.items():
            before = torch.get_rng_state()
            with self._inside():
                part()
            if not torch.equal(before, torch.get_rng_state()):
                yield f"{name} drew random numbers, though the model draws none"


class TwoModels(RemarkingProgram):
    """A program after which its model, fresh, and a second one are trained in one graph, and each beside the other."""

    quantity = "gradients of two models"

    def statements(self) -> Iterator[str]:
        """Yield the gradients that are not the mean over ranks. Collectives: those of both models; every rank calls."""
        batch = Batch(11)
        other = replace(self.case, seed=self.case.seed + 1)
        both = [(self.model, self.case, self.optimizer), (self._model_of(other, {}), other, None)]
        with self._inside():
            losses = [self._loss(model, case, batch) for model, case, _ in both]
            self.adapter.backward(self.model, losses[0] + losses[1])
        for number, (model, case, _) in enumerate(both):
            yield from self._wrong(model, case, batch, f"model {number} after one backward through both")
        for number, quiet in ((1, 0), (0, 1)) if "no_sync" in self.adapter.capabilities else ():
            for model, _, optimizer in both:
                self.adapter.zero_grad(model, optimizer, True)
            model, case, _ = both[number]
            with self._inside(), self.adapter.no_sync(both[quiet][0]):
                self.adapter.backward(model, self._loss(model, case, batch))
            yield from self._wrong(model, case, batch, f"model {number} while model {quiet} is in no_sync")
        self.adapter.finish(both[1][0])

    def _loss(self, model: nn.Module, case: Case, batch: Batch) -> torch.Tensor:
        return models.forward(model, case, batch, self.rank, models.make_inputs(case, batch, self.rank)).loss

    def _wrong(self, model: nn.Module, case: Case, batch: Batch, where: str) -> Iterator[str]:
        ranks = [models.gradients_of_rank(case, batch, rank) for rank in range(case.world.size)]
        bound = max(bound for _, bound in ranks)
        for fqn, pieces in self.adapter.local_pieces(model).items():
            mean = torch.stack([gradients[fqn] for gradients, _ in ranks]).mean(0).reshape(-1)
            for piece in pieces:
                due = mean[piece.start : piece.stop]
                got = torch.full_like(due, torch.nan) if piece.grad is None else piece.grad.detach().cpu().reshape(-1)
                if len(due) and not bool((got - due).abs().max() <= bound):
                    what = "none" if piece.grad is None else f"one off by {float((got - due).abs().max()):.3g}"
                    yield f"{where}: expected the mean gradient of {fqn} over ranks, got {what} (bound {bound:.3g})"


ONE_INPUT_BUFFER = RunMode(rank_jobs.run_as, (OneInputBuffer, {}))
RECOMPUTES = RunMode(rank_jobs.run_as, (Recomputes, {}), review=review_remarks)


OF_ONE_PASS: tuple[Check, ...] = (
    check("training.not_a_number", "Inputs of NaN on one rank make every gradient NaN on every rank.",
          cases("mlp uneven", *iteration(0), optimizer=PLAIN_SGD), source="torch.isnan: training notices that it diverges",
          mode=RunMode(rank_jobs.run_as, (NotANumber, {}), review=review_remarks), sizes=ODD, of_pieces=True),
    check("training.random_numbers", "Training draws no random numbers but those of the model.",
          cases("mlp uneven", *iteration(0), optimizer=PLAIN_SGD), source="torch.nn.Dropout: masks of a seed",
          mode=RunMode(rank_jobs.run_as, (DrawsNothing, {}), review=review_remarks)),
    check("full_state_dict.random_numbers", "Saving and loading draw no random numbers.",
          cases("mlp uneven", *iteration(0), optimizer=PLAIN_SGD), source="torch.nn.Dropout: masks of a seed",
          needs={"full_state_dict"}, mode=RunMode(rank_jobs.run_as, (DrawsNothing, {"saves": True}), review=review_remarks)),
    check("zero_grad.kept_gradients", "Gradients that a user keeps while they are cleared to None stay as they are.",
          cases("mlp uneven", *iteration(0), optimizer=PLAIN_SGD), source="torch.nn.Module.zero_grad, set_to_none",
          mode=RunMode(rank_jobs.run_as, (KeepsGradients, {}), review=review_remarks), of_pieces=True),
    check("training.two_models", "Two models get the mean gradients of one backward through both, and each by itself.",
          cases("mlp uneven"), source="adversarial training, distillation: two sharded models in one graph",
          needs={"several_models"}, mode=RunMode(rank_jobs.run_as, (TwoModels, {}), review=review_remarks), sizes=ODD,
          of_pieces=True),
    check("accumulation.stays_local", "In no_sync nothing is reduced.", cases("mlp", no_sync_batch(0), optimizer=PLAIN_SGD),
          source="torch.nn.parallel.DistributedDataParallel.no_sync",
          mode=RunMode(rank_jobs.run_as, (StaysLocal, {}), review=review_remarks)),
)  # fmt: skip
