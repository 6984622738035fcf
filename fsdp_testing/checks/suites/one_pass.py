"""Programs after which one more micro-batch is looked at: whether it is reduced, computed again, and passes NaN on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import nn

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.cases.records import UNIT_ROUNDOFF, Batch, Case
from fsdp_testing.checks.suites.check import ODD, PLAIN_SGD, Check, cases, check, iteration, no_sync_batch
from fsdp_testing.checks.suites.programs import review_remarks
from fsdp_testing.checks.suites.state_programs import RemarkingProgram
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.oracle import models, rank_jobs
from fsdp_testing.ranks.ledger.interception import listen
from fsdp_testing.ranks.ledger.records import Call, GroupIdentity


class StaysLocal(RemarkingProgram):
    """A program after which a micro-batch runs in no_sync, while its collectives are counted."""

    quantity = "no_sync"

    def statements(self) -> Iterator[str]:
        """Yield what it sent; wholly right numbers may hide it, since sums of means are means of sums."""
        sent: set[str] = set()
        one_model = self.case.world.of_one_model(self.rank)

        def note(group: GroupIdentity, call: Call, _site: object) -> None:
            if group.members != one_model and "reduce" in call.what[0] and set(call.what) & set(UNIT_ROUNDOFF):
                sent.add(call.text)

        batch = Batch(11)
        inputs = models.make_inputs(self.case, batch, self.rank)
        for where in ("in no_sync", "after an inner no_sync ended, in the outer one"):
            sent.clear()
            with self._inside(), self.adapter.no_sync(self.model):
                with nullcontext() if where == "in no_sync" else self.adapter.no_sync(self.model):
                    pass
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
        # By a user's hooks, put on before the model is wrapped.
        for name in case.wrapping.checkpointed:
            module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: self.ran.update([name]))
        return super()._setup(case, module)

    def statements(self) -> Iterator[str]:
        """Yield what ran once; numbers are those of a model that is computed once."""
        self.ran.clear()
        batch = Batch(11)
        with self._inside():
            inputs = models.make_inputs(self.case, batch, self.rank)
            self.backward(models.forward(self.model, self.case, batch, self.rank, inputs).loss)
        for name in self.case.wrapping.checkpointed:
            # None at all: hooks of a user's module no longer run, so that nobody can tell.
            if self.ran[name] < 2:
                yield (
                    f"{name} is to be computed again in backward: expected a forward and another one in a micro-batch, got "
                    f"{self.ran[name]}"
                )


class NotANumber(RemarkingProgram):
    """A program after which a micro-batch runs whose inputs are NaN on the last rank."""

    quantity = "gradients"

    def statements(self) -> Iterator[str]:
        """Yield how many elements of the gradients are no NaN, or missing; a mean with NaN is NaN."""
        self.zero_grad(set_to_none=True)
        batch = Batch(11)
        inputs = models.make_inputs(self.case, batch, self.rank)
        if self.rank == self.case.world.size - 1:
            args = models.map_tensors(lambda tensor: torch.full_like(tensor, torch.nan), inputs.args)
            inputs = models.Inputs(args, inputs.kwargs)
        with self._inside():
            self.backward(models.forward(self.model, self.case, batch, self.rank, inputs).loss)
        for fqn, pieces in self.adapter.local_pieces(self.model).items():
            held = sum(piece.stop - piece.start for piece in pieces)
            nans = sum(int(piece.grad.isnan().sum()) for piece in pieces if piece.grad is not None)
            if nans < held:
                yield f"the inputs of one rank are NaN, and {held - nans} elements of the mean gradient of {fqn} are not"
        self.zero_grad(set_to_none=True)


RECOMPUTES = RunMode(rank_jobs.run_as, (Recomputes, {}), review=review_remarks)


OF_ONE_PASS: tuple[Check, ...] = (
    check("training.not_a_number", "Inputs of NaN on one rank make every gradient NaN on every rank.",
          cases("mlp uneven", *iteration(0), optimizer=PLAIN_SGD), source="torch.isnan: training notices that it diverges",
          mode=RunMode(rank_jobs.run_as, (NotANumber, {}), review=review_remarks), sizes=ODD),
    check("accumulation.stays_local", "In no_sync nothing is reduced.", cases("mlp", no_sync_batch(0), optimizer=PLAIN_SGD),
          source="torch.nn.parallel.DistributedDataParallel.no_sync",
          mode=RunMode(rank_jobs.run_as, (StaysLocal, {}), review=review_remarks)),
)  # fmt: skip
