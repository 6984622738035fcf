"""An optimizer's state: it belongs to the same parameters in a fresh instance, another wrapping, another number of ranks."""

from __future__ import annotations

from dataclasses import replace

from fsdp_testing.cases.operations import Restore, Save, TrainElsewhere
from fsdp_testing.cases.operations.reloading import ELSEWHERE
from fsdp_testing.cases.records import (
    Batch,
    Case,
    Freeze,
    Observe,
    OptimizerSpec,
    Reload,
    SetLr,
    Step,
    Thaw,
    WrappingPlan,
    ZeroGrad,
)
from fsdp_testing.checks.suites.check import (
    ADAMW,
    LOCKSTEP,
    ODD,
    PLAIN_SGD,
    Check,
    cases,
    forward,
    iteration,
    iterations,
    micro_batch,
)
from fsdp_testing.checks.suites.optimizer_programs import (
    ENTRIES,
    GROUPED,
    NO_GROUPS,
    OF_GROUPS,
    OF_USERS,
    RATES_IN_TENSORS,
    REFUSED_OPTIMIZER,
    REORDERED,
    STORED_DTYPES,
    WITHOUT_GROUPS,
    WRONG_OPTIMIZERS,
)
from fsdp_testing.checks.suites.other_worlds import judge_moved
from fsdp_testing.checks.suites.state import LOW, NESTED, rolled_back, saved

_DECAYED = OptimizerSpec("sgd", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1})
_ONE, _ALL = ((True, False, False),), ((True, True, True),)


def _with_optimizer(form: str, *optimizers: OptimizerSpec) -> tuple[Case, ...]:
    program = (*iterations(2), Reload(form), Observe(), *iterations(2, first=2))
    return tuple(case for optimizer in optimizers for case in cases("uneven", *program, optimizer=optimizer))


def _on_some_ranks(case: Case) -> Case:
    """Return the case with all ranks but one (one, if alone) elsewhere, under its own strategy where that is possible."""
    strategy = case.strategy if case.strategy in ELSEWHERE else "full_shard"
    program = (
        replace(operation, ranks=max(1, case.world.size - 1), strategy=strategy)
        if isinstance(operation, TrainElsewhere)
        else operation
        for operation in case.program
    )
    return replace(case, program=tuple(program))


CHECKS: tuple[Check, ...] = (
    saved("optim_state.rolled_back",
          "Loading brings back a model and an optimizer that were trained further since.",
          rolled_back("full", "uneven", optimizer=ADAMW), rolled_back("full", "mlp", SetLr(0.2), optimizer=_DECAYED),
          source="torch.optim.Optimizer.load_state_dict", sizes=ODD),
    saved("optim_state.rolled_back_to_the_start", "Loaded into an optimizer that stepped since, the state of one that never "
        "stepped leaves it none.",
          cases("mlp", Save(optimizer=True), *iterations(2), Restore(), Observe(), *iterations(2, first=2), optimizer=ADAMW),
          source="torch.optim.Optimizer.load_state_dict"),
    saved("optim_state.fresh_instance",
          "Model and optimizer, loaded into fresh instances, continue as if they had never been saved.",
          _with_optimizer("full", ADAMW, _DECAYED), sizes=ODD),
    saved("optim_state.sharded_model", "The same with model and optimizer saved in shards.",
          _with_optimizer("sharded", ADAMW), needs={"full_state_dict"}),
    saved("optim_state.strict", "Optimizer state with a missing parameter, an extra one or moments of another shape is refused.",
          *(cases("mlp", *iteration(0), Observe(wrong), optimizer=ADAMW) for wrong in WRONG_OPTIMIZERS),
          source="torch.optim.Optimizer.load_state_dict", needs={"optim_state"}, mode=REFUSED_OPTIMIZER),
    saved("optim_state.dtypes", "Saved optimizer state has the storage dtype of parameters.",
          *(cases("mlp", *iteration(0), dtype="float32", optimizer=ADAMW, precision=precision) for precision in LOW),
          source="torch.distributed.fsdp.MixedPrecision", comparison=LOCKSTEP, needs={"optim_state"}, mode=STORED_DTYPES),
    saved("optim_state.entries_of_users", "Entries that a user keeps with parameters are saved and loaded as they are.",
          *(cases("mlp", *iteration(0), Observe(label), optimizer=ADAMW) for label in ENTRIES if label not in OF_GROUPS),
          source="torch.optim.Optimizer.state", needs={"optim_state", "user_entries"}, mode=OF_USERS),
    saved("optim_state.entries_of_groups", "What a user or a schedule keeps in a group is saved and loaded as it is.",
          *(cases("mlp", *iteration(0), Observe(label), optimizer=ADAMW) for label in sorted(OF_GROUPS)),
          source="torch.optim.lr_scheduler.LRScheduler, initial_lr", needs={"optim_state"}, mode=OF_USERS),
    saved("optim_state.rates_in_tensors", "Changing a learning rate in its tensor leaves the state that was loaded as it is.",
          cases("mlp", *iteration(0), optimizer=replace(ADAMW, name="adamw_tensor_lr")),
          source="torch.optim.Optimizer.load_state_dict, which copies groups", needs={"optim_state"}, mode=RATES_IN_TENSORS),
    *(saved(f"optim_state.of_one_process{of}", f"State that one process trained further is loaded{what}.",
            cases(model, *iterations(2), Reload(through=Batch(7)), Observe(), *iterations(2, first=2), optimizer=ADAMW),
            source="torch.optim.Optimizer.state_dict of a model that nothing wraps", sizes=ODD)
      for of, what, model in (("", "", "uneven"), ("_strided", ", of weights that are not contiguous, too", "strided"))),
    saved("optim_state.without_groups", "A state without `param_groups` is loaded, and settings stay; or it is refused.",
          cases("mlp", *iteration(0), Observe(NO_GROUPS), optimizer=ADAMW),
          source="fsdp_ref.checkpoint.optim_load", needs={"optim_state"}, mode=WITHOUT_GROUPS),
    saved("optim_state.groups", "Each group of parameters gets its own settings back, whatever the new optimizer was built with.",
          *(cases("mlp", *iterations(2), Reload(), Observe(), *iterations(2, first=2), optimizer=optimizer)
            for optimizer in (_DECAYED, OptimizerSpec("adamw", {"lr": 0.02, "weight_decay": 0.1}))),
          cases("mlp", *iteration(0), Save(optimizer=True), SetLr(0.3), *iteration(1), Restore(), *iteration(2),
                optimizer=_DECAYED),
          source="torch.optim.Optimizer.load_state_dict", needs={"frozen_mixed_unit"}, mode=GROUPED, by_name=True),
    saved("optim_state.reordered", "State is loaded by parameter name, whatever the order in the new optimizer.",
          cases("mlp uneven", *iterations(2), Reload(), Observe(), *iterations(2, first=2), optimizer=ADAMW),
          needs={"reordered_optimizer"}, mode=REORDERED),
    saved("optim_state.learning_rate", "The learning rate at the time of saving is restored, zero included.",
          cases("mlp", *iteration(0), SetLr(0.2), Reload(), *iterations(2, first=1), SetLr(0.0), Reload(), *iteration(3)),
          source="pytorch PR 128685"),
    saved("optim_state.other_wrapping", "Optimizer state saved under one wrapping loads under another.",
          cases("mlp", *iterations(2), Reload(units=()), Observe(), *iteration(2), Reload(units=("layers.2",)), *iteration(3),
                optimizer=ADAMW), needs=NESTED),
    saved("optim_state.other_world_size",
          "Optimizer state of N ranks loads and trains on N+1 ranks, and then on N ranks again.",
          cases("uneven", *iteration(0), SetLr(0.02), *iteration(1), Save(optimizer=True), optimizer=ADAMW),
          needs={"full_state_dict", "optim_state"}, judge=judge_moved),
    saved("optim_state.some_ranks",
          "Some of the ranks load and train the state of all ranks; then all ranks load theirs.",
          *(cases("uneven", *iterations(2), TrainElsewhere(Batch(7), 1, last), Observe(), Save(optimizer=True), *iteration(2),
                  optimizer=ADAMW) for last in (False, True)),
          needs={"full_state_dict", "optim_state", "sub_groups"}, fit=_on_some_ranks),
    saved("optim_state.some_ranks_clip", "The norm by which some of the ranks clip is that of their own gradients.",
          *(cases("uneven", *iterations(2), TrainElsewhere(Batch(7), 1, last, max_norm=0.01), Observe(), *iteration(2),
                  optimizer=ADAMW) for last in (False, True)),
          needs={"full_state_dict", "optim_state", "sub_groups"}, fit=_on_some_ranks),
    saved("optim_state.before_first_step",
          "An optimizer that never stepped can be saved and loaded; its step counts start at zero, and its rate stays.",
          cases("mlp", Reload(), Observe(), *iterations(2), optimizer=ADAMW),
          cases("mlp", Save(optimizer=True), Observe(), *iteration(0), optimizer=PLAIN_SGD),
          source="torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"),
    saved("optim_state.partly_stepped", "State of parameters that were never stepped, which is none, is saved and loaded.",
          *(cases("conditional", *iteration(0, usage=_ONE), *save, *iteration(1, usage=_ONE), Restore(), Observe(),
                  *iterations(2, first=2, usage=_ALL), wrapping=wrapping, optimizer=ADAMW)
            for save, wrapping in (((Save(optimizer=True),), WrappingPlan()), ((Reload(), Save(optimizer=True)), None))),
          source="torch.optim.Optimizer.state", needs={"unused_gradient_is_none"}),
    saved("optim_state.steps_apart", "Parameters that were stepped a different number of times keep their numbers of steps.",
          cases("conditional", *iteration(0, usage=_ONE), *iterations(2, first=1, usage=_ALL), Reload(), Observe(),
                *iterations(2, first=3, usage=_ALL), optimizer=ADAMW, freeze=("never.*",)),
          source="torch.optim.Adam, step", needs={"unused_gradient_is_none"}),
    saved("optim_state.further_entries", "What an optimizer keeps besides the usual moments is saved and loaded.",
          cases("mlp uneven", *iteration(0, scale=4.0), *iteration(1), Reload(), Observe(), *iterations(2, first=2),
                optimizer=OptimizerSpec("adamw", {**ADAMW.arguments, "amsgrad": True})),
          source="torch.optim.AdamW, amsgrad"),
    saved("optim_state.further_numbers", "Numbers that an optimizer keeps besides the count of steps are saved and loaded.",
          cases("mlp uneven", *iterations(2), Reload(), Observe(), *iterations(2, first=2),
                dtype="float32", optimizer=OptimizerSpec("nadam", {"lr": 0.05, "eps": 1e-3, "momentum_decay": 0.1})),
          source="torch.optim.NAdam, mu_product"),
    saved("optim_state.without_state", "An optimizer that keeps no state can be saved and loaded, with its learning rate.",
          cases("mlp", *iteration(0), SetLr(0.02), Reload(), *iteration(1), optimizer=PLAIN_SGD),
          source="torch.optim.SGD without momentum"),
    saved("optim_state.repeatedly", "Saving and loading after every step does not change training.",
          cases("mlp", *iteration(0), Reload(), *iteration(1), Reload(), micro_batch(2), Step(), forward(3), optimizer=ADAMW)),
    saved("optim_state.beside_gradients", "Saving and loading leave gradients as they are, and the next step takes them.",
          cases("mlp", *iteration(0), micro_batch(1), Save(optimizer=True), Observe(), Restore(keeps_gradients=True), Observe(),
                Step(), ZeroGrad(), *iteration(2), optimizer=ADAMW),
          source="torch.optim.Optimizer.load_state_dict"),
    saved("optim_state.frozen_later", "Parameters that were frozen since they were stepped keep their state when it is saved.",
          cases("mlp", *iteration(0), Freeze(("layers.0.*",)), Save(optimizer=True), *iteration(1), Restore(), Observe(),
                Thaw(("*",)), *iteration(2), optimizer=ADAMW), source="torch.optim.Optimizer.state_dict"),
    saved("optim_state.frozen_parameters", "Frozen parameters have no optimizer state, and loading gives them none.",
          cases("frozen_body", *iterations(2), Reload(), Observe(), *iteration(2), optimizer=ADAMW),
          source="pytorch PR 76671"),
    saved("optim_state.strided_parameters", "Loaded state belongs to the same elements, whatever the strides of a weight.",
          cases("strided", *iterations(2), Reload(), Observe(), *iteration(2), optimizer=ADAMW),
          source="https://github.com/NVIDIA/physicsnemo/pull/1597"),
    saved("optim_state.shared_parameters", "A shared parameter has one optimizer state.",
          cases("tied_within", *iterations(2), Reload(), Observe(), *iteration(2), optimizer=ADAMW),
          source="pytorch issue 128011, PR 128685"),
)  # fmt: skip
"""In each form of the model's state."""
