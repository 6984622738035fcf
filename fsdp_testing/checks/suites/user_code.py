"""Users' own code: exceptions, `module.to`, `copy.deepcopy`, parts of a model replaced by others or called alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, reduce
from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.models import tensors_in
from fsdp_testing.cases.operations import user_code
from fsdp_testing.cases.records import (
    UNIT_ROUNDOFF,
    Batch,
    BuildOptimizer,
    Case,
    Interrupt,
    MixedPrecisionSpec,
    Move,
    Observe,
    Step,
    WrappingPlan,
)
from fsdp_testing.checks.suites.check import (
    ADAMW,
    LOCKSTEP,
    ODD,
    PLAIN_SGD,
    Check,
    accumulated,
    cases,
    check,
    every_unit,
    forward,
    iteration,
    iterations,
    micro_batch,
    no_sync_batch,
)
from fsdp_testing.checks.suites.one_pass import OF_ONE_PASS, StaysLocal
from fsdp_testing.checks.suites.programs import (
    ALONE,
    COPY,
    COPY_IN_NO_SYNC,
    MAY_REFUSE,
    MODULE,
    MUST_COPY,
    PARAMETERS,
    PART,
    PARTS,
    PARTS_REPLACED,
    CopyingProgram,
    review_remarks,
)
from fsdp_testing.checks.suites.state_programs import ProgramWithMarks, RemarkingProgram, SavesItsCopy
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.oracle import models, rank_jobs
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.quantities import Comparison


def _raised(seed: int, module: int, *, backward: bool = False, where: str = "step") -> Interrupt:
    return Interrupt(Batch(seed), module, backward, where)


def _in_a_pass(*, backward: bool) -> tuple[Case, ...]:
    """Before the first pass has ever ended, and in the middle of training; at the first module and at the last."""
    early = cases("mlp", _raised(9, 0, backward=backward), *iterations(2), optimizer=ADAMW)
    later = (
        cases("deep_nest", *iteration(0), _raised(9, at, backward=backward), *iterations(2, first=1), optimizer=ADAMW)
        for at in (0, 2)
    )
    return sum(later, early)


interrupted = partial(check, source="every way out of a pass restores what it changed")

EXCEPTIONS: tuple[Check, ...] = (
    interrupted("exceptions.in_forward", "After an exception in a forward, training continues as if that forward had "
        "not begun.",
                _in_a_pass(backward=False)),
    interrupted("exceptions.in_backward",
                "After an exception in a backward and zero_grad, training continues as if neither had happened.",
                _in_a_pass(backward=True)),
    interrupted("exceptions.beside_gradients", "An exception in a forward takes nothing from the gradients before it.",
                *(cases("mlp", before, Interrupt(Batch(9), at, keeps_gradients=True), *after, Observe(), Step(),
                        forward(5, "no_grad"), wrapping=wrapping, optimizer=PLAIN_SGD)
                  for before, after in ((micro_batch(0), ()), (no_sync_batch(0), (micro_batch(1),)))
                  for at, wrapping in ((1, None), (0, every_unit("mlp", forward_prefetch=True))))),
    check("exceptions.in_no_sync", "An exception inside no_sync ends it: the next iteration reduces.",
          *(cases("mlp", *iteration(0), _raised(9, 1, backward=backward, where="no_sync"), *iteration(1, Observe()),
                  *accumulated(2, 3), Step()) for backward in (False, True)),
          source="contextlib: the exit runs on every way out"),
    interrupted("exceptions.caught_in_no_sync", "After an exception that is caught inside no_sync, later gradients stay local.",
                cases("mlp", no_sync_batch(0), optimizer=PLAIN_SGD), needs={"exception_recovery"},
                mode=RunMode(rank_jobs.run_as, (StaysLocal, {"caught": True}), review=review_remarks)),
    check("exceptions.in_summon", "An exception while full parameters are gathered releases them.",
          cases("mlp", _raised(9, 0, where="summon"), *iteration(0), _raised(8, 0, where="summon"), micro_batch(1), Step()),
          source="torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params"),
    interrupted("exceptions.repeatedly", "Several exceptions in a row, in forward and backward, leave nothing behind.",
                cases("mlp", *iteration(0), _raised(9, 1), _raised(8, 1, backward=True), _raised(7, 0),
                      *iteration(1), _raised(6, 2, backward=True), *iteration(2))),
)  # fmt: skip
"""After the user's own code raised, one ordinary iteration is an ordinary iteration."""

copied = partial(check, source="copy.deepcopy; B077", needs={"deep_copies"}, mode=MUST_COPY)

CONVERSION: tuple[Check, ...] = (
    check("conversion.same_device",
          "`module.to` the current device changes nothing, before training and in the middle.",
          cases("uneven", Move(), *iteration(0), Move(), *iteration(1), forward(5), optimizer=ADAMW),
          cases("deep_nest", forward(5, "train"), Move(), *iteration(0), forward(6), Move(), *iteration(1), optimizer=PLAIN_SGD),
          source="torch.nn.Module.to"),
    check("conversion.dtype", "`module.to(dtype)` before the first forward: training happens in that dtype.",
          cases("mlp", Move("float32"), BuildOptimizer(), *iterations(2), optimizer=ADAMW),
          cases("uneven", Move("float64"), BuildOptimizer(), *iterations(2), optimizer=ADAMW, dtype="float32"),
          source="torch.nn.Module.to; B078"),
    check("conversion.dtype_of_buffers",
          "`module.to(dtype)` before the first forward casts floating buffers, and no others.",
          cases("buffers", Move("float32"), BuildOptimizer(), *iterations(2)), source="torch.nn.Module.to"),
    check("conversion.dtype_later", "`module.to(dtype)` between iterations: training continues in that dtype.",
          cases("mlp", BuildOptimizer(), *iteration(0), Move("float64"), BuildOptimizer(), *iterations(2, first=1),
                optimizer=PLAIN_SGD, dtype="float32"),
          source="torch.nn.Module.to; B078", needs={"dtype_cast_later"}),
    check("conversion.deepcopy",
          "A deep copy trains independently of the original, or is refused on every rank.",
          cases("mlp", *iteration(0), Observe(COPY), micro_batch(1), Observe(), Step(), optimizer=PLAIN_SGD),
          cases("mlp", Observe(COPY), micro_batch(1), Observe(), Step(), optimizer=PLAIN_SGD),
          source="copy.deepcopy; B077", mode=MAY_REFUSE),
    check("conversion.deepcopy_in_no_sync",
          "A deep copy made inside no_sync reduces its gradients outside of it, or is refused on every rank.",
          cases("mlp", *iteration(0), Observe(COPY_IN_NO_SYNC), micro_batch(1), Observe(), Step(), optimizer=PLAIN_SGD),
          source="copy.deepcopy", mode=MAY_REFUSE, needs={"no_sync"}),
    check("conversion.copied_state", "A deep copy saves what the model saves, buffers in their own dtype too.",
          *(cases(model, *iteration(0), Observe(SavesItsCopy.label), *iteration(1), dtype="float32", optimizer=PLAIN_SGD,
                  precision=MixedPrecisionSpec("bfloat16", None, "bfloat16")) for model in ("buffers", "mlp")),
          source="copy.deepcopy; B077", needs={"full_state_dict", "deep_copies"}, comparison=LOCKSTEP,
          mode=RunMode(rank_jobs.run_as, (SavesItsCopy, {}), review=review_remarks)),
    check("conversion.copied", "A deep copy can be made, and trains independently of the original.",
          cases("mlp", *iteration(0), Observe(COPY), micro_batch(1), Observe(), Step(), optimizer=PLAIN_SGD),
          source="copy.deepcopy; B077", needs={"deep_copies"}, mode=MUST_COPY),
    *(copied(f"conversion.copied_{what}", f"A deep copy of a model with {what.replace('_', ' ')} trains as the model does.",
             cases(model, *iteration(0), Observe(COPY), micro_batch(1), Observe(), Step(), optimizer=PLAIN_SGD))
      for what, model in (("buffers", "buffers"), ("frozen_units", "frozen_body"), ("shared_parameters", "tied_within"))),
    copied("conversion.copied_ignored_parameters", "A deep copy of a model that ignores parameters trains as the model does.",
           cases("mlp", *iteration(0, alike=True), Observe(COPY), micro_batch(1, alike=True), Observe(), Step(),
                 optimizer=PLAIN_SGD, wrapping=WrappingPlan(("layers.1", "layers.2"), ignored=("layers.0",)))),
    copied("conversion.copied_precision", "A deep copy computes in the precision of the model.",
           *(cases("mlp", *iteration(0), Observe(COPY), micro_batch(1), Observe(), Step(), optimizer=PLAIN_SGD, dtype="float32",
                   precision=MixedPrecisionSpec("bfloat16", reduced)) for reduced in (None, "float32")),
           comparison=LOCKSTEP),
    check("conversion.copied_between_micro_batches", "A deep copy made in an accumulation takes nothing from it.",
          cases("mlp uneven", no_sync_batch(0), Observe(COPY), micro_batch(1), Observe(), Step(), optimizer=PLAIN_SGD),
          source="copy.deepcopy", needs={"deep_copies", "no_sync"},
          mode=RunMode(rank_jobs.run_as, (CopyingProgram, {"may_refuse": False}))),
)  # fmt: skip
"""What users do to modules besides training: `module.to`, `copy.deepcopy`."""


class LendsInputs(RemarkingProgram):
    """A program after which a micro-batch runs on inputs of which the user has copies."""

    quantity = "inputs"

    def statements(self) -> Iterator[str]:
        """Report a user's tensor that forward or backward has written to."""
        batch = Batch(11)
        lent, kept = (models.make_inputs(self.case, batch, self.rank) for _ in range(2))
        with self._inside():
            self.backward(models.forward(self.model, self.case, batch, self.rank, lent).loss)
        before, after = (tensors_in((inputs.args, dict(inputs.kwargs))) for inputs in (kept, lent))
        if any(one.dtype != other.dtype or not torch.equal(one, other) for one, other in zip(before, after)):
            yield "inputs that the user passed are not what they were before forward and backward"


class CallsInside(ProgramWithMarks):
    """A program that calls modules inside units at its marked points: they compute with whole parameters, or refuse."""

    quantity = "a module that is called outside its unit's forward"
    label = "modules inside units are called"

    def observe(self, label: str) -> None:
        """Call each module that is inside a unit and has no parts, before the snapshot."""
        if label == self.label:
            given = torch.linspace(-1.0, 1.0, 16, dtype=self.dtype)
            results = {unit: self._called(unit, given) for unit in self.case.wrapping.units}
            plain = self.plain_part("")
            plain.load_state_dict(self.adapter.full_state_dict(self.model))  # after the calls: it may gather or free
            for unit, result in results.items():
                inner = plain.get_submodule(f"{unit}.inner")
                if result is not None and not _equal(result, inner(_rows(given, inner))):
                    self.remarks.append(
                        f"{unit}.inner computes with other values than the model's, and raises no error"
                    )
        super().observe(label)

    def _called(self, unit: str, given: torch.Tensor) -> torch.Tensor | None:
        """Return what the module inside a unit gives; None: it refuses."""
        plain = self.plain_part(f"{unit}.inner")
        # Wrappers, which have names of their own, are around it.
        *_, module = (part for part in user_code.part(self.model, unit).modules() if isinstance(part, type(plain)))
        try:
            with torch.no_grad():
                result: torch.Tensor = module(_rows(given, plain))
        except Exception:  # noqa: BLE001 - whatever it raises, it refuses
            return None
        return result


class AssignsOtherShapes(RemarkingProgram):
    """Gives a parameter data that is one element longer than it shows, and runs a forward."""

    quantity = "data of another shape"

    def statements(self) -> Iterator[str]:
        """Yield a fault if the forward ran."""
        fqn, parameter = next(iter(self.adapter.named_parameters(self.model)))
        try:
            parameter.data = parameter.detach().new_zeros(parameter.numel() + 1)
            self.call(Batch(11))
        except Exception:  # noqa: BLE001 - whatever it raises, it refuses
            return
        yield f"{fqn} was given data of another shape, and the next forward ran, expected an error"


def _rows(given: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Return the numbers as rows that the module takes."""
    return given.reshape(-1, next(module.parameters()).shape[-1])


def _equal(result: torch.Tensor, expected: torch.Tensor) -> bool:
    # Sums of eight products of numbers up to one, in any order.
    return result.shape == expected.shape and bool(((result - expected).abs() <= 64 * UNIT_ROUNDOFF["float64"]).all())


class ChunkedLoss(RankProgram):
    """A program whose model leaves its last layer out of forward; the layer is called on chunks of rows afterwards.

    So does training whose logits fit no memory: each chunk has a backward of its own, and the model's comes last.
    """

    separate = True
    """Whether each chunk has its backward before the next chunk's forward; if not, all have one."""

    def call(self, batch: Any, **_: Any) -> models.Forwarded:
        """Run the model, then its last layer on each chunk of what it returned."""
        inputs = models.make_inputs(self.case, batch, self.rank)
        model: Any = getattr(self.model, "module", self.model)
        layers: list[nn.Module] = [*model.layers]
        flow = model._flow
        with self._inside():
            model._flow = lambda _, x: reduce(lambda hidden, layer: torch.tanh(layer(hidden)), layers[:-1], x)
            try:
                self._hidden = self.model(*inputs.args, **inputs.kwargs)
            finally:
                model._flow = flow
            self._detached, output, losses = self._hidden.detach().requires_grad_(), [], []
            for rows in self._detached.split(_CHUNK):
                chunk = torch.tanh(layers[-1](rows))
                losses.append(models.loss_of(chunk))
                output.append(chunk.detach())
                if self.separate:
                    super().backward(losses.pop())
        outputs = torch.cat(output)
        self._loss = torch.stack(losses).sum() if losses else outputs
        return models.Forwarded(models.loss_of(outputs).requires_grad_(), (outputs,), models.structure_of(outputs))

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of the chunks, where they have one, and of the model."""
        if not self.separate:
            super().backward(self._loss)
        super().backward((self._hidden * self._detached.grad).sum())


class ChunkedForward(ChunkedLoss):
    """A program in which all chunks have one backward."""

    separate = False


_CHUNK = 2


# An adapter may still show the part that was replaced, so the model's results decide.
replaced = partial(check, comparison=Comparison(ignore=(f"{PART}.*",)), mode=PARTS_REPLACED)

PARTS_OF_MODELS: tuple[Check, ...] = (
    replaced("parts.module_replaced",
             "A module that replaces another before the first forward is trained like the others.",
             cases("mlp", Observe(MODULE), BuildOptimizer(), micro_batch(0), Step(), forward(1),
                   wrapping=WrappingPlan(), optimizer=PLAIN_SGD),
             source="pytorch PR 87837", needs={"modules_replaced"}),
    replaced("parts.parameters_replaced",
             "If a parameter is replaced between forwards, the next forward uses the new one.",
             cases("mlp", forward(0, "no_grad"), Observe(PARAMETERS), forward(1)),
             source="pytorch issue 132721", needs={"parameters_replaced"}),
    check("parts.data_of_another_shape", "A parameter that is given data of another shape is refused by the next forward.",
          cases("mlp", *iteration(0), optimizer=PLAIN_SGD), source="torch.nn.Parameter.data", needs={"data_assignment"},
          mode=RunMode(rank_jobs.run_as, (AssignsOtherShapes, {}), review=review_remarks)),
    check("parts.called_alone",
          "Calling a unit directly, before the model and between iterations, changes nothing.",
          cases("mlp", Observe(ALONE), *iteration(0), Observe(ALONE), *iteration(1)),
          source="pytorch PR 90862, 87900", needs={"unit_alone", "nested_wrapping"}, mode=PARTS),
    *(check(f"parts.chunked_{what}{grouped}", f"A layer{which} trains that runs on chunks of what the model returns, {how}.",
            *(cases(model, *iterations(2, rows=rows), *iterations(2, first=2, rows=rows), optimizer=optimizer,
                    wrapping=every_unit(model, settings=settings))
              for model, rows, optimizer in ((models[0], (4,), ADAMW), (models[-1], (3, 4), PLAIN_SGD))),
            source="torch.distributed.fsdp.fully_shard", needs={"units_after_forward"}, sizes=ODD,
            mode=RunMode(rank_jobs.run_as, (program, {})))
      for what, how, program in (("loss", "each with a backward of its own", ChunkedLoss),
                                 ("forward", "all with one backward", ChunkedForward))
      for grouped, which, models, settings in (
        ("", "", ("mlp", "uneven"), ()),
        ("_grouped", " of a unit of which another ran in forward", ("wide",), ("grouped_units",)),
    )),
    check("parts.called_inside", "A module inside a unit that is called outside the unit's forward has whole parameters, or "
        "refuses.",
          cases("inner_modules", Observe(CallsInside.label), *iteration(0), Observe(CallsInside.label), forward(5),
                Observe(CallsInside.label), *iteration(1), optimizer=PLAIN_SGD),
          source="https://pytorch.org/docs/stable/fsdp.html", needs={"full_state_dict", "nested_wrapping"},
          mode=RunMode(rank_jobs.run_as, (CallsInside, {}), review=review_remarks)),
)  # fmt: skip
"""Parts of a wrapped model in users' hands: replaced by others, or called directly."""


_LENT = RunMode(rank_jobs.run_as, (LendsInputs, {}), review=review_remarks)
lent = partial(check, source="torch.nn.Module.forward", mode=_LENT)

INPUTS: tuple[Check, ...] = (
    lent("inputs.kept", "Forward and backward leave the tensors that a user passes as they are.",
         cases("mlp keywords", *iteration(0))),
    lent("inputs.kept_in_low_precision", "Inputs that are cast are copies.",
         cases("mlp keywords", *iteration(0), dtype="float32", precision=MixedPrecisionSpec("bfloat16")),
         comparison=LOCKSTEP),
    check("inputs.containers", "A container of inputs stays of its type where the inputs are cast.",
          cases("container_inputs", *iterations(2), dtype="float32", precision=MixedPrecisionSpec("bfloat16")),
          source="pytorch PR 91078", comparison=LOCKSTEP),
    check("inputs.dataclasses", "A dataclass of inputs stays what it is, and its tensors are cast with the others.",
          cases("record_input", *iterations(2)),
          cases("record_input", *iterations(2), dtype="float32", precision=MixedPrecisionSpec("bfloat16"), optimizer=PLAIN_SGD),
          source="pytorch PR 91078", comparison=LOCKSTEP),
    check("inputs.rare_dataclasses", "A dataclass with slots, and one that is a mapping of more than its fields, lose nothing.",
          cases("rare_record_input", *iterations(2), dtype="float32", precision=MixedPrecisionSpec("bfloat16"),
                optimizer=PLAIN_SGD),
          source="pytorch PR 91078", comparison=LOCKSTEP),
)  # fmt: skip
"""Tensors that users pass to a model stay unchanged."""

CHECKS = (*OF_ONE_PASS, *INPUTS, *EXCEPTIONS, *CONVERSION, *PARTS_OF_MODELS)
