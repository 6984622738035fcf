"""Training: iterations, accumulation before and after a reduction, unusual backwards, gradients cleared, forwards alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fsdp_testing.cases.operations import (
    AssignData,
    EditFullParameters,
    EditGradients,
    Freeze,
    Interrupt,
    LocalMicroBatches,
    Move,
    Save,
    SeveralForwards,
    UnusualBackward,
)
from fsdp_testing.cases.records import (
    Batch,
    BuildOptimizer,
    Case,
    Clip,
    Observe,
    Operation,
    OptimizerSpec,
    Reload,
    SetLr,
    Step,
    Thaw,
    ZeroGrad,
)
from fsdp_testing.checks.suites.check import (
    ADAMW,
    LOCKSTEP,
    MOMENTUM,
    ODD,
    PLAIN_SGD,
    UP_TO_EIGHT,
    Check,
    accumulated,
    cases,
    check,
    forward,
    iteration,
    iterations,
    micro_batch,
    micro_batches,
    no_sync_batch,
)
from fsdp_testing.checks.suites.programs import IN_EVALUATION
from fsdp_testing.judging.case_runner import RunMode

_EVERY_REDUCED = {"accumulate_without_no_sync"}
_NESTEROV = OptimizerSpec("sgd", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1})
_USED, _UNUSED = ((True, True, True),), ((False, False, False),)


def _by_kernel(kernel: str, optimizer: OptimizerSpec) -> OptimizerSpec:
    return replace(optimizer, arguments={**optimizer.arguments, kernel: True})


FREED = RunMode(arguments=(True,))
trained = partial(check, source="PyTorch FSDP, VLDB 2023, section 3.2")

TRAINING: tuple[Check, ...] = (
    trained("training.sgd_momentum", "SGD with momentum trains as in one process.",
            cases("mlp deep_nest embedding", *iterations(4)), cases("mlp", *iterations(4), optimizer=_NESTEROV)),
    trained("training.adamw_weight_decay", "AdamW with weight decay trains as in one process.",
            cases("mlp deep_nest embedding", *iterations(4), optimizer=ADAMW)),
    *(trained(f"training.{name}", f"{who} with `{kernel}=True` train as in one process, and their state loads again.",
              *(cases(model, *iterations(2), *reloaded, *iterations(2, first=2), optimizer=_by_kernel(kernel, optimizer))
                for optimizer in optimizers for model, reloaded in (("mlp", (Reload(),)), ("uneven", ()))),
              needs={"optim_state"})
      for name, who, kernel, optimizers in (
        ("fused_adam", "Adam and AdamW", "fused", (ADAMW, replace(ADAMW, name="adam"))),
        ("fused_sgd", "SGD optimizers", "fused", (_NESTEROV, MOMENTUM)),
        ("foreach", "Optimizers", "foreach", (ADAMW, _NESTEROV)),
    )),
    *(check(f"training.tensor_lr{of}", f"A learning rate in a tensor is followed, and saved and loaded{where}, as a number is.",
            cases("mlp", *iterations(2), SetLr(0.05), *iteration(2), Reload(form), *iteration(3), SetLr(0.02), *iteration(4),
                  optimizer=replace(ADAMW, name="adamw_tensor_lr")),
            source="torch.optim.AdamW")
      for form, of, where in (("full", "", ""), ("sharded", "_in_shards", " in shards"))),
    check("training.in_evaluation", "A model in evaluation trains as one process trains it.",
          cases("mlp deep_nest", *iteration(0), *accumulated(1, 2), Observe(), Step(), optimizer=ADAMW),
          source="torch.nn.Module.eval", mode=IN_EVALUATION),
    check("training.freed", "A model that is dropped frees its parameters.",
          cases("mlp", *iterations(2), optimizer=PLAIN_SGD), source="torch.nn.Module", mode=FREED),
    check("training.steps_by_norms", "An optimizer that steps each parameter by its norm sees whole parameters.",
          cases("mlp uneven", *iterations(3), optimizer=OptimizerSpec("lars", {"lr": 0.05})),
          source="PyTorch FSDP, VLDB 2023, section 7.2.1", sizes=ODD),
    check("training.gradients_are_means",
          "After backward each gradient is the mean over ranks: not the sum, not a rank's own.",
          cases("mlp deep_nest uneven", micro_batch(0), Observe("gradients"), Step(), ZeroGrad(), micro_batch(1)),
          source="pytorch PR 89915", sizes=UP_TO_EIGHT),
    check("training.each_operation_exactly",
          "Replayed from the implementation's state, each operation gives the same bits (sums over ranks in any "
          "order).",
          *(cases("mlp uneven", *iterations(2), micro_batch(9), optimizer=ADAMW, dtype=dtype)
            for dtype in ("float64", "float32")),
          source="IEEE 754: two summands commute", comparison=LOCKSTEP, sizes=ODD),
    check("training.changed_in_forward",
          "Modules that clip their own weights in forward train and evaluate as in one process.",
          *(cases("self_clipping", *iterations(3), forward(7, "no_grad"), *iteration(4), optimizer=optimizer)
            for optimizer in (MOMENTUM, ADAMW)),
          source="torch.nn.Module: parameters are the module's own", needs={"forward_edits"}),
    check("training.strided_changed_in_forward", "Modules that clip transposed weights of theirs train as in one process.",
          cases("strided_clipping", *iterations(3), optimizer=MOMENTUM),
          source="torch.nn.Module: parameters are the module's own", needs={"forward_edits"}),
    trained("training.learning_rate_changes", "A learning rate set between iterations takes effect, zero included.",
            cases("mlp", *iterations(2), SetLr(0.2), *iterations(2, first=2), SetLr(0.0), *iteration(4))),
    trained("training.many_iterations", "The twelfth iteration is as right as the first ones.",
            cases("mlp uneven", *iterations(12), Observe(), optimizer=ADAMW)),
    trained("training.late_optimizer", "An optimizer built after some iterations, or rebuilt, trains as in one "
        "process.",
            cases("mlp", micro_batch(0), ZeroGrad(), BuildOptimizer(), *iterations(2, first=1), optimizer=ADAMW),
            cases("mlp", micro_batch(0), BuildOptimizer(), Step(), ZeroGrad(), *iteration(1)),
            cases("mlp", BuildOptimizer(), *iterations(2), BuildOptimizer(), *iterations(2, first=2))),
    check("training.magnitudes", "Iterations whose inputs differ by powers of ten keep their weight.",
          cases("mlp", *iteration(0, scale=1.0), *iteration(1, scale=10.0), *iteration(2, scale=0.01), optimizer=PLAIN_SGD),
          source="Megatron-LM PR 3023"),
    check("training.uneven_batches", "Ranks with different numbers of rows average their gradients with equal weight.",
          cases("mlp", *iterations(2, rows=(5, 2, 3))), cases("deep_nest", *iterations(2, rows=(1, 7))),
          source="torch.nn.parallel.DistributedDataParallel, note on uneven inputs", sizes=ODD),
    check("training.empty_batches", "A rank without rows takes part with a gradient of zeros.",
          cases("mlp", *iteration(0), *iterations(2, first=1, rows=(4, 0))),
          cases("mlp", *iteration(0, rows=(0, 3)), *iteration(1)),
          source="torch.distributed.algorithms.join: the case without joining", sizes=ODD),
    trained("training.float32", "Training in float32 stays within float32's roundings.",
            cases("mlp", *iterations(3), optimizer=ADAMW, dtype="float32"),
            cases("deep_nest", *iterations(3), dtype="float32")),
    trained("training.same_batch_twice", "The same micro-batch twice gives twice the gradient.",
            cases("mlp", *micro_batches(0, 0), Step(), optimizer=PLAIN_SGD), needs=_EVERY_REDUCED),
)  # fmt: skip
"""Forward, backward, step: several iterations on inputs that differ between ranks."""

_NESTED = LocalMicroBatches((Batch(0), Batch(1), Batch(2)), nested=True)
_edit = partial(EditGradients, ("layers.1.*",))


def _edited(*edits: EditGradients) -> tuple[Case, ...]:
    """Each edit between two reductions, and after them."""
    return tuple(
        case
        for edit in edits
        for case in cases(
            "mlp",
            *(micro_batch(0), edit, Observe(), micro_batch(1), Observe(), edit, Step(), ZeroGrad()),
            *iteration(2, edit),
            optimizer=ADAMW,
        )
    )


ACCUMULATION: tuple[Check, ...] = (
    check("accumulation.no_sync_then_reduced", "Local micro-batches and a reduced one give the gradient of all of them.",
          cases("mlp deep_nest uneven", *accumulated(0, 1, 2), Step(), ZeroGrad(),
                *accumulated(3, 4), Observe(), Step(), optimizer=ADAMW),
          cases("mlp", *accumulated(*range(9)), Observe(), Step(), optimizer=PLAIN_SGD),
          source="pytorch PR 90546", sizes=ODD),
    check("accumulation.without_no_sync", "Reduced micro-batches add up.",
          cases("mlp deep_nest uneven", *micro_batches(0, 1, 2), Step(), ZeroGrad(),
                *micro_batches(3, 4), Observe(), Step(), optimizer=ADAMW),
          source="pytorch issue 73784, PR 73535", needs=_EVERY_REDUCED, sizes=ODD),
    check("accumulation.alternating", "Local and reduced micro-batches in any order add up.",
          cases("mlp", micro_batch(0), *accumulated(1, 2), Step(), ZeroGrad(),
                micro_batch(3), *accumulated(4, 5, 6), Step()),
          cases("deep_nest", *accumulated(0, 1), *accumulated(2, 3), Step(), ZeroGrad(), *iteration(4)),
          source="pytorch PR 91193", needs=_EVERY_REDUCED),
    check("accumulation.ends_on_local",
          "A local micro-batch that is not reduced yet changes neither parameters nor later results.",
          cases("mlp", *iteration(0), no_sync_batch(1)),
          cases("mlp", *iteration(0), no_sync_batch(1), forward(2), micro_batch(3), Step(), optimizer=PLAIN_SGD),
          cases("deep_nest", no_sync_batch(0)),
          source="pytorch PR 124193"),
    check("accumulation.forward_between", "Forward passes between micro-batches disturb no gradient.",
          *(cases("mlp", no_sync_batch(0), forward(1, mode), no_sync_batch(2), forward(3, mode),
                  micro_batch(4), forward(5, mode), Step(), forward(6, mode)) for mode in ("eval", "no_grad")),
          source="pytorch PR 110139"),
    check("accumulation.inference_between", "A forward in inference mode between micro-batches disturbs no gradient.",
          cases("mlp", no_sync_batch(0), forward(1, "inference"), micro_batch(2), Observe(), Step(), optimizer=PLAIN_SGD),
          source="torch.inference_mode"),
    check("accumulation.zero_dim", "Gradients of parameters of shape () are accumulated.",
          cases("scalars", *accumulated(0, 1), Observe(), Step(), optimizer=PLAIN_SGD), source="torch.nn.Parameter of shape ()"),
    check("accumulation.magnitudes", "No micro-batch is rescaled or lost, whatever its size.",
          cases("mlp", no_sync_batch(0, scale=1.0), no_sync_batch(1, scale=10.0), micro_batch(2, scale=0.1),
                Observe(), Step(), optimizer=PLAIN_SGD),
          cases("mlp", no_sync_batch(0, scale=0.1), micro_batch(1, scale=1.0), micro_batch(2, scale=10.0),
                Step(), optimizer=PLAIN_SGD),
          source="Megatron-LM PR 3023, 7186", needs=_EVERY_REDUCED),
    check("accumulation.clipped", "Accumulated gradients are clipped by the norm of their sum.",
          cases("mlp", *accumulated(0, 1), Clip(0.5), Step(), ZeroGrad(), *accumulated(2, 3), dtype="float32"),
          source="torch.nn.utils.clip_grad_norm_"),
    # A unit that stays gathered after a local micro-batch must see the step that follows.
    check("accumulation.fresh_weights", "After a step no unit computes with weights gathered before it.",
          cases("mlp", *accumulated(0, 1), Step(), ZeroGrad(), forward(2),
                *accumulated(3, 4), Step(), ZeroGrad(), forward(5)),
          cases("deep_nest", *iteration(0), no_sync_batch(1), forward(2, "train"), *iteration(3), forward(4)),
          source="Zhao et al., PyTorch FSDP, section 3.3: communication and accumulation"),
    check("accumulation.nested_no_sync", "Leaving a nested no_sync keeps the outer one active, and leaving both ends "
        "both.",
          cases("mlp deep_nest", _NESTED, micro_batch(3), Observe(), Step(), ZeroGrad(), *iteration(4), optimizer=PLAIN_SGD),
          source="contextlib: a context restores what it changes"),
    check("accumulation.gradient_edited", "An in-place change of a reduced gradient counts, in later sums too.",
          _edited(_edit("halved")), source="torch.Tensor.grad", needs=_EVERY_REDUCED),
    check("accumulation.several_forwards",
          "Each of several forwards may have its backward later, in either order, and every gradient is reduced.",
          *(cases("mlp deep_nest", SeveralForwards((Batch(0), Batch(1)), reverse), Observe(), Step(), ZeroGrad(),
                  micro_batch(5), SeveralForwards((Batch(2), Batch(3), Batch(4)), reverse), Observe(), Step())
            for reverse in (False, True)),
          source="pytorch issue 47260, 106637, 136861"),
)  # fmt: skip
"""Several micro-batches before a step, each reduced or only the last, in any order."""


def _between(*operations: Operation, models: str = "mlp deep_nest") -> tuple[Case, ...]:
    """Each operation between a local micro-batch and a reduced one; then a step, and the same once more."""
    return tuple(
        case
        for model in models.split()
        for operation in operations
        for case in cases(
            model,
            *(no_sync_batch(0), operation, micro_batch(1), Observe(), Step(), ZeroGrad()),
            *(no_sync_batch(2), operation, micro_batch(3), Observe(), Step()),
            optimizer=PLAIN_SGD,
        )
    )


# "Gradients will be accumulated in module variables, which will later be synchronized in the first forward-backward pass
# after exiting the context" (torch's FSDP and DDP): any operation in between sees the gradients, or clears them.
pending = partial(check, source="torch.distributed.fsdp.FullyShardedDataParallel.no_sync")

PENDING: tuple[Check, ...] = (
    pending("accumulation.cleared", "Gradients that are cleared before any reduction leave no trace.",
            _between(ZeroGrad(), ZeroGrad(False))),
    pending("accumulation.saved",
            "A model can be saved while gradients await reduction; the model that loads it starts without gradients.",
            _between(Reload(optimizer=False), models="mlp")),
    pending("accumulation.saved_and_trained_on", "Saving a model takes nothing from its gradients that await reduction.",
            _between(Save(optimizer=False), models="mlp")),
    pending("accumulation.edited", "Editing full parameters changes no gradient that awaits reduction.",
            _between(EditFullParameters(("*",), 0.5))),
    pending("accumulation.edited_in_place", "Parameters that change in place change no gradient that awaits reduction.",
            _between(AssignData(("*",), 0.5, Batch(7), in_place=True))),
    pending("accumulation.assigned", "New storage of parameters changes no gradient that awaits reduction.",
            _between(AssignData(("*",), 0.5, Batch(7)))),
    pending("accumulation.moved", "Moving the model to its current device changes no gradient that awaits reduction.",
            _between(Move())),
    pending("accumulation.frozen", "A parameter that is frozen while its gradient awaits reduction is reduced with the others.",
            _between(Freeze(("layers.1.*",)), models="mlp")),
    pending("accumulation.interrupted",
            "An exception after a local micro-batch leaves no trace once gradients are cleared, nor does the micro-batch.",
            _between(Interrupt(Batch(7)), Interrupt(Batch(7), 1, backward=True))),
    pending("accumulation.cleared_after_reduction", "Clearing drops reduced gradients and those that await reduction.",
            cases("mlp deep_nest", micro_batch(0), no_sync_batch(1), ZeroGrad(), micro_batch(2), Observe(), Step(),
                  optimizer=PLAIN_SGD)),
    pending("accumulation.cleared_then_unused",
            "A gradient cleared to zeros stays zero, at full size, if the next micro-batch does not use its parameter.",
            *(cases("conditional", micro_batch(0, usage=_USED), Observe(), no_sync_batch(1, usage=_USED), cleared,
                    micro_batch(2, usage=_UNUSED), Observe(), Step(), micro_batch(3, usage=_USED), Observe(),
                    optimizer=PLAIN_SGD) for cleared in (ZeroGrad(False), ZeroGrad()))),
    pending("accumulation.late_optimizer", "An optimizer that is built while gradients await reduction uses all of "
        "them.",
            cases("mlp deep_nest", no_sync_batch(0), BuildOptimizer(), micro_batch(1), Step(), ZeroGrad(),
                  micro_batch(2), Step(), optimizer=PLAIN_SGD)),
)  # fmt: skip
"""User actions between a micro-batch in no_sync and the one that reduces: all of them are allowed."""

BACKWARDS: tuple[Check, ...] = (
    *(check(f"backward.{form}", meaning,
            cases("mlp deep_nest", UnusualBackward(Batch(0), form), Observe(), Step(), ZeroGrad(), micro_batch(1), Observe(),
                  optimizer=PLAIN_SGD),
            source=source, needs=needs) for form, meaning, source, needs in (
        ("twice", "A second backward through a kept graph is reduced too.", "pytorch issue 106637", _EVERY_REDUCED),
        ("penalty", "A loss computed from gradients has the gradient that one process computes.",
         "pytorch issue 172543", set()),
        ("after_no_sync", "Whether a backward is reduced depends on where it runs, not on where its forward ran.",
         "pytorch issue 47260", set()),
        ("inputs", "A backward that names the parameters gives each the gradient of one process.",
         "torch.autograd.backward", set()),
        ("one_input", "A backward that names one parameter gives a gradient to that parameter alone.",
         "torch.autograd.backward", {"unused_gradient_is_none"}),
        ("evaluated", "A forward under no_grad between forward and backward changes no gradient.", "pytorch PR 110139", set()),
        ("of_inputs", "Inputs that require gradients get those of this rank's own loss.", "torch.autograd.backward", set()),
        ("inner", "A forward of the module inside the wrapper is still reduced.", "torch.nn.parallel", set()),
    )),
    # Before the first step, and later; nothing follows, because a failed backward need not allow it.
    check("backward.outdated",
          "A backward whose values a step has changed since forward is refused on every rank, as one process refuses it.",
          *(cases(model, *before, UnusualBackward(Batch(seed), "outdated"), optimizer=PLAIN_SGD)
            for model in ("mlp", "deep_nest")
            for seed, before in ((1, [micro_batch(0)]), (2, [*iteration(0), micro_batch(1)]))),
          source="torch.autograd: saved tensors and in-place operations"),
)  # fmt: skip
"""Backwards other than one backward of the wrapper's last forward: a second one, one of gradients, one elsewhere."""

cleared = partial(check, source="torch.optim")
_FORMS = (True, False)

ZERO_GRAD: tuple[Check, ...] = (
    check("zero_grad.both_forms", "Gradients are None, or zeros, after zero_grad, and training continues as in one "
        "process.",
          *(cases("mlp", *(op for seed in range(3) for op in (micro_batch(seed), Step(), ZeroGrad(to_none), Observe())),
                  optimizer=ADAMW) for to_none in _FORMS),
          source="torch.optim.Optimizer.zero_grad"),
    cleared("zero_grad.before_first_backward", "Clearing gradients that do not exist changes nothing.",
            *(cases(model, *program) for to_none in _FORMS for model, program in (
                ("mlp", [ZeroGrad(to_none), Observe(), *iteration(0)[:-1], ZeroGrad(to_none), ZeroGrad(not to_none)]),
                ("uneven", [ZeroGrad(to_none), ZeroGrad(to_none), *iteration(0)[:-1]])))),
    cleared("zero_grad.some_parameters",
            "Setting some gradients to zeros or None does not change the others, nor later sums.",
            _edited(_edit("zeros"), _edit("none"), EditGradients(("layers.1.weight",), "none")), needs=_EVERY_REDUCED),
    cleared("zero_grad.dropped_then_unused", "A gradient that is dropped stays None while its parameter is not used.",
            cases("partly_used", micro_batch(0, usage=((True, True),)), EditGradients(("second.sometimes.*",), "none"),
                  micro_batch(1, usage=((True, False),)), Observe(), Step(), ZeroGrad(), *iteration(2, usage=((True, True),)),
                  optimizer=ADAMW), needs=_EVERY_REDUCED),
    cleared("zero_grad.given_to_unused", "A gradient that a user gives to an unused parameter stays, and is stepped on.",
            cases("partly_used", micro_batch(0, usage=((True, False),)), EditGradients(("second.sometimes.*",), "given"),
                  micro_batch(1, usage=((True, False),)), Observe(), Step(), ZeroGrad(), *iteration(2, usage=((True, True),)),
                  optimizer=ADAMW), source="torch.Tensor.grad", needs=_EVERY_REDUCED),
    cleared("zero_grad.replaced_gradients", "A gradient that a user puts in the place of another is summed and stepped on.",
            _edited(EditGradients(("*",), "replaced"), _edit("replaced"), _edit("given")),
            cases("mlp", EditGradients(("*",), "given"), Observe(), Step(), ZeroGrad(), *iteration(0), _edit("given"), Observe(),
                  micro_batch(1), Observe(), Step(), optimizer=ADAMW),
            source="torch.Tensor.grad", needs=_EVERY_REDUCED),
    cleared("zero_grad.discards", "A gradient that is cleared before the step leaves no trace.",
            *(cases("mlp", micro_batch(0), ZeroGrad(to_none), micro_batch(1), Step(), ZeroGrad(to_none), micro_batch(2))
              for to_none in _FORMS)),
    cleared("zero_grad.frozen_since", "Clearing reaches parameters that were frozen after backward.",
            *(cases("mlp", micro_batch(0), Freeze(("layers.1.*",)), ZeroGrad(to_none), Thaw(("*",)), micro_batch(1), Observe(),
                    Step(), optimizer=PLAIN_SGD) for to_none in _FORMS), source="torch.optim.Optimizer.zero_grad"),
    cleared("zero_grad.between_forwards", "Clearing between forward passes changes nothing else.",
            *(cases("mlp", micro_batch(0), Step(), forward(1), ZeroGrad(to_none), forward(2, "train"), ZeroGrad(to_none),
                    *iteration(3)) for to_none in _FORMS)),
    cleared("zero_grad.mixed_forms", "The form of clearing may change from iteration to iteration.",
            cases("deep_nest", *(op for seed, to_none in enumerate((True, False, False, True, False))
                                 for op in (micro_batch(seed), Step(), ZeroGrad(to_none))), optimizer=ADAMW)),
    # With momentum and weight decay a gradient of zeros moves parameters and None does not.
    check("zero_grad.then_step", "A step on zeros decays and moves by momentum; a step on None does nothing.",
          *(cases("mlp", *iteration(0), micro_batch(1), ZeroGrad(to_none), Step(), Step(), optimizer=ADAMW)
            for to_none in _FORMS),
          source="torch.optim.AdamW"),
)  # fmt: skip
"""zero_grad in both forms, anywhere in the schedule."""


def _everywhere(mode: str) -> tuple[Case, ...]:
    first, second, third = (forward(seed, mode) for seed in (10, 11, 12))
    between = (micro_batch(0), first, Step(), second, ZeroGrad(), third, *iteration(1))
    # The root of deep_nest holds parameters, and roots have rules of their own.
    return (
        *cases("mlp", first, *iterations(2), second),
        *cases("mlp deep_nest", *between),
        *cases("deep_nest", *iteration(0), first, second, *iterations(2, first=1)),
    )


FORWARD_ONLY: tuple[Check, ...] = (
    *(check(f"forward_only.{mode}", f"Forward passes {words} give the right output and disturb nothing.",
            _everywhere(mode), source=source) for mode, words, source in (
        ("train", "in training mode whose output is dropped", "pytorch issue 83107"),
        ("eval", "in evaluation mode with gradients on", "pytorch PR 110139"),
        ("no_grad", "under no_grad in evaluation mode", "pytorch PR 110139"),
        ("inference", "under inference_mode", "torch.inference_mode"),
    )),
    check("forward_only.modes_mixed", "Modes may change from pass to pass.",
          cases("mlp", *(op for seed, mode in enumerate(("eval", "train", "no_grad", "eval", "train"))
                         for op in (forward(20 + seed, mode), *iteration(seed)))),
          source="pytorch PR 110139"),
    check("forward_only.keeps_gradients", "Gradients that wait for a step survive forward passes.",
          cases("mlp", micro_batch(0), Observe(), forward(1), forward(2, "no_grad"), forward(3, "train"),
                Observe(), Step(), Observe()),
          source="pytorch PR 110139"),
    check("forward_only.batch_norm", "Evaluation uses the statistics of training, and does not change them.",
          cases("batch_norm", *iterations(2), forward(10), forward(11, "no_grad"), *iteration(2), forward(12)),
          source="torch.nn.BatchNorm1d"),
)  # fmt: skip
"""Forward passes that no backward follows, in every mode, at any point of the schedule."""

CHECKS = (*TRAINING, *ACCUMULATION, *PENDING, *BACKWARDS, *ZERO_GRAD, *FORWARD_ONLY)
