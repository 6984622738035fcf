"""Evaluation in full precision of models that train in mixed precision."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from fsdp_testing.cases.models import tensors_in
from fsdp_testing.cases.records import UNIT_ROUNDOFF, Batch, MixedPrecisionSpec, Observe
from fsdp_testing.checks.suites.check import (
    LOCKSTEP,
    PLAIN_SGD,
    Check,
    cases,
    check,
    every_unit,
    iteration,
    micro_batch,
)
from fsdp_testing.checks.suites.programs import review_remarks
from fsdp_testing.checks.suites.state_programs import ProgramWithMarks
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.oracle import models, rank_jobs


class EvaluatesPrecisely(ProgramWithMarks):
    """A program that evaluates at its marked points, and compares with the plain model of the stored values."""

    quantity = "evaluation"
    label = "the model is evaluated"

    def observe(self, label: str) -> None:
        """Evaluate after the snapshot: buffers stay in full precision until a model trains again."""
        super().observe(label)
        for batch in (Batch(77), Batch(78)) if label == self.label else ():
            plain = self.plain_part("")
            with self._inside():
                got = self._evaluated(self.model, batch)
                plain.load_state_dict(self.adapter.full_state_dict(self.model))
                self.remarks += self._takes_buffers(plain)
            self.remarks += self._odd(got, self._evaluated(plain, batch))

    def _takes_buffers(self, plain: torch.nn.Module) -> Iterator[str]:
        """Give `plain` the numbers of buffers, which keep the roundings that training gave them; yield other dtypes."""
        for name, buffer in self.adapter.named_buffers(self.model):
            own = plain.get_buffer(name)
            own.copy_(buffer)
            if own.dtype != buffer.dtype:
                yield f"buffer {name} has dtype {buffer.dtype} in evaluation, expected {own.dtype}"

    def _evaluated(self, model: torch.nn.Module, batch: Batch) -> list[torch.Tensor]:
        inputs = models.make_inputs(self.case, batch, self.rank)
        model.eval()
        with torch.no_grad():
            outputs = tensors_in(model(*inputs.args, **inputs.kwargs))
        model.train()
        return [output.cpu() for output in outputs]

    @staticmethod
    def _odd(got: list[torch.Tensor], due: list[torch.Tensor]) -> Iterator[str]:
        for one, other in zip(got, due, strict=True):
            if one.dtype != other.dtype:
                yield f"a tensor has dtype {one.dtype}, expected {other.dtype}"
            # Sums of a few products of numbers up to one, in any order; an input in 16 bits is off by 2 ** -9 of itself.
            elif not bool(((one - other).abs() <= 64 * UNIT_ROUNDOFF["float32"] * (1 + other.abs())).all()):
                yield f"a tensor is off by {float((one - other).abs().max()):.2g} from that in full precision"


class TrainsInEvaluation(EvaluatesPrecisely):
    """A program that runs backward in evaluation mode at its marked points, and compares with the plain model."""

    quantity = "gradient in evaluation mode"
    label = "backward runs in evaluation mode"

    def observe(self, label: str) -> None:
        """Run backward after the evaluation, and clear the gradients again."""
        super().observe(label)
        if label != self.label:
            return
        plain = self.plain_part("")
        with self._inside():
            plain.load_state_dict(self.adapter.full_state_dict(self.model))
            for model in (self.model, plain):
                self._backward(model)
            due = {name: self._mean(parameter) for name, parameter in plain.named_parameters()}
            for name, pieces in self.adapter.local_pieces(self.model).items():
                for piece in pieces:
                    if piece.grad is not None:
                        mine = due[name].reshape(-1)[piece.start : piece.stop]
                        self.remarks += self._odd([piece.grad.reshape(-1).cpu()], [mine])
        self.model.zero_grad(set_to_none=True)

    def _backward(self, model: torch.nn.Module) -> None:
        inputs = models.make_inputs(self.case, Batch(79), self.rank)
        model.eval()
        torch.stack([output.mean() for output in tensors_in(model(*inputs.args, **inputs.kwargs))]).sum().backward()
        model.train()

    @staticmethod
    def _mean(parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()


_LOW = MixedPrecisionSpec("bfloat16", "float32")

CHECKS: tuple[Check, ...] = tuple(
    check(f"mixed_precision.{name}", f"{what} in full precision where that is chosen, and training stays as it was.",
          *(cases(model, *iteration(0), Observe(program.label), *iteration(1), Observe(program.label), micro_batch(2), Observe(),
                  dtype="float32", optimizer=PLAIN_SGD, precision=precision,
                  wrapping=every_unit(model, settings=("precise_evaluation",), forward_prefetch=prefetches))
            for model, prefetches in (("mlp", False), ("mlp", True), ("deep_nest", False), ("buffers", False))),
          source="torch.distributed.fsdp, FSDP_USE_FULL_PREC_IN_EVAL; pytorch PR 97645", comparison=LOCKSTEP,
          mode=RunMode(rank_jobs.run_as, (program, {}), review=review_remarks))
    for name, what, program, precision in (
        ("precise_evaluation", "Evaluation is", EvaluatesPrecisely, _LOW),
        ("precise_evaluation_with_buffers", "Evaluation is", EvaluatesPrecisely,
         MixedPrecisionSpec("bfloat16", "float32", "bfloat16")),
        ("precise_backward", "Gradients of a backward in evaluation are", TrainsInEvaluation, MixedPrecisionSpec("bfloat16")),
    )
)  # fmt: skip
"""Outputs in evaluation, and gradients, have all digits of the stored weights."""
