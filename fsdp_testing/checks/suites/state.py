"""State: what was saved is what is loaded, into a fresh instance, another wrapping, another number of ranks.

Loading is judged by what comes after it: the loaded model has the saved values, and goes on training as if it had never
been saved. The instance that loads was built from other values, so that nothing comes from its construction.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fsdp_testing.cases.operations import Save, TrainElsewhere
from fsdp_testing.cases.operations.reloading import ELSEWHERE
from fsdp_testing.cases.records import Batch, Case, Observe, OptimizerSpec, Reload, SetLr, Step
from fsdp_testing.checks.suites.check import ADAMW, PLAIN_SGD, Check, cases, check
from fsdp_testing.checks.suites.moving import judge_moved
from fsdp_testing.checks.suites.schedules import forward, iteration, iterations, micro_batch

_DECAYED = OptimizerSpec("sgd", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1})
_NESTED = {"nested_wrapping"}


def _model(form: str, models: str) -> tuple[Case, ...]:
    """Trained, saved and loaded without the optimizer, trained on."""
    program = (*iteration(0), Reload(form, optimizer=False), Observe(), *iteration(1))
    return cases(models, *program, optimizer=PLAIN_SGD)


def _before_training(form: str) -> tuple[Case, ...]:
    return cases("mlp", Reload(form, optimizer=False), Observe(), *iteration(0), optimizer=PLAIN_SGD)


def _with_optimizer(form: str, *optimizers: OptimizerSpec) -> tuple[Case, ...]:
    program = (*iterations(2), Reload(form), Observe(), *iterations(2, first=2))
    return tuple(case for optimizer in optimizers for case in cases("uneven", *program, optimizer=optimizer))


def _on_some_ranks(case: Case) -> Case:
    """Return the case with all ranks but one in the other world, under the case's own strategy where that is possible."""
    strategy = case.strategy if case.strategy in ELSEWHERE else "full_shard"
    program = (
        replace(operation, ranks=case.world.size - 1, strategy=strategy)
        if isinstance(operation, TrainElsewhere)
        else operation
        for operation in case.program
    )
    return replace(case, program=tuple(program))


saved = partial(check, source="torch.distributed.checkpoint.state_dict")

CHECKS: tuple[Check, ...] = (
    saved("full_state_dict.fresh_instance", "A saved model, loaded into a fresh instance, has its values and trains on.",
          _model("full", "uneven embedding")),
    saved("full_state_dict.saved_again", "Every save holds the values of its own moment, whatever is frozen.",
          *(cases("mlp", Save(), *iteration(0), Save(), Save(), *iteration(1), Save(), Reload(optimizer=False), Observe(),
                  optimizer=PLAIN_SGD, freeze=freeze) for freeze in ((), ("layers.0.*",)))),
    saved("sharded_state_dict.saved_again", "What shards hold at the second save is what is loaded.",
          *(cases("mlp", Save("sharded"), *iteration(0), Reload("sharded", optimizer=False), Observe(),
                  optimizer=PLAIN_SGD, freeze=freeze) for freeze in ((), ("layers.0.*",)))),
    saved("full_state_dict.before_training", "A model can be saved and loaded before its first forward.",
          _before_training("full"), source="pytorch PR 90862"),
    saved("full_state_dict.buffers", "Buffers are saved and loaded with the parameters, in their dtypes.",
          _model("full", "buffers"), source="pytorch issue 93391"),
    saved("full_state_dict.shared_parameters",
          "Parameters under two names, and units under two names, are saved and loaded as one.",
          _model("full", "tied_within registered_twice"), source="pytorch PR 98912, 99448"),
    # To the root alone, and from there to another unit.
    saved("full_state_dict.other_wrapping", "What one wrapping saved another one loads.",
          cases("mlp", *iteration(0), Reload("full", optimizer=False, units=()), Observe(),
                *iteration(1), Reload("full", optimizer=False, units=("layers.1",)), *iteration(2), optimizer=PLAIN_SGD),
          source="pytorch PR 90933", needs=_NESTED),
    saved("full_state_dict.other_world_size", "What N ranks saved N+1 ranks load and train, and N ranks again after them.",
          cases("uneven", *iteration(0), optimizer=PLAIN_SGD),
          needs={"full_state_dict"}, judge=partial(judge_moved, optimizer=False)),
    saved("sharded_state_dict.fresh_instance",
          "A model saved in shards, loaded into a fresh instance, has its values and trains on.",
          _model("sharded", "mlp uneven")),
    saved("sharded_state_dict.before_training", "A model can be saved and loaded in shards before its first forward.",
          _before_training("sharded"), source="pytorch PR 90862"),
    saved("sharded_state_dict.buffers", "Buffers are saved and loaded with the shards.", _model("sharded", "buffers")),
    saved("local_state_dict.fresh_instance", "Raw shards, loaded on the rank that saved them, give the model back.",
          _model("local", "mlp uneven"), source="torch.distributed.fsdp.LocalStateDictConfig; pytorch PR 94109"),
    saved("optim_state.fresh_instance",
          "Model and optimizer, loaded into fresh instances, go on as if they had never been saved.",
          _with_optimizer("full", ADAMW, _DECAYED)),
    saved("optim_state.sharded_model", "The same with the model saved in shards.",
          _with_optimizer("sharded", ADAMW), needs={"full_state_dict"}),
    saved("optim_state.learning_rate", "The learning rate at the time of saving is restored, zero included.",
          cases("mlp", *iteration(0), SetLr(0.2), Reload(), *iterations(2, first=1), SetLr(0.0), Reload(), *iteration(3)),
          source="pytorch PR 128685"),
    saved("optim_state.other_wrapping", "Optimizer state that one wrapping saved another one loads.",
          cases("mlp", *iterations(2), Reload(units=()), Observe(), *iteration(2), Reload(units=("layers.2",)), *iteration(3),
                optimizer=ADAMW), needs=_NESTED),
    saved("optim_state.other_world_size",
          "Optimizer state that N ranks saved N+1 ranks load and train, and N ranks again after them.",
          cases("uneven", *iteration(0), SetLr(0.02), *iteration(1), optimizer=ADAMW),
          needs={"full_state_dict", "optim_state"}, judge=judge_moved),
    saved("optim_state.some_ranks",
          "Model and optimizer of all ranks some of them load and train, and all of them what those saved.",
          *(cases("uneven", *iterations(2), TrainElsewhere(Batch(7), 1, last), Observe(), *iteration(2), optimizer=ADAMW)
            for last in (False, True)),
          needs={"full_state_dict", "optim_state", "sub_groups"}, fit=_on_some_ranks),
    saved("optim_state.before_first_step",
          "An optimizer that never stepped can be saved and loaded, and its step counts start at zero.",
          cases("mlp", Reload(), Observe(), *iterations(2), optimizer=ADAMW),
          source="torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"),
    saved("optim_state.without_state", "An optimizer that keeps no state can be saved and loaded, with its learning rate.",
          cases("mlp", *iteration(0), SetLr(0.02), Reload(), *iteration(1), optimizer=PLAIN_SGD),
          source="torch.optim.SGD without momentum"),
    saved("optim_state.repeatedly", "Saved and loaded after every step, training is the same.",
          cases("mlp", *iteration(0), Reload(), *iteration(1), Reload(), micro_batch(2), Step(), forward(3), optimizer=ADAMW)),
    saved("optim_state.frozen_parameters", "Frozen parameters have no optimizer state, and loading gives them none.",
          cases("frozen_body", *iterations(2), Reload(), Observe(), *iteration(2), optimizer=ADAMW),
          source="pytorch PR 76671"),
    saved("optim_state.shared_parameters", "A shared parameter has one optimizer state.",
          cases("tied_within", *iterations(2), Reload(), Observe(), *iteration(2), optimizer=ADAMW),
          source="pytorch issue 128011, PR 128685"),
)  # fmt: skip
"""Model and optimizer, whole, in shards and raw."""
