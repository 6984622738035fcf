"""State: what was saved is what is loaded, into a fresh instance, another wrapping, another number of ranks.

Loading is judged by what comes after it: the loaded model has the saved values, and goes on training as if it had never
been saved. The instance that loads was built from other values, so that nothing comes from its construction.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from fsdp_testing.records import Case, Observe, OptimizerSpec, Reload, SetLr, Step
from fsdp_testing.suites.check import ADAMW, MOMENTUM, PLAIN_SGD, Builder, Check, Place
from fsdp_testing.suites.moving import judge_moved
from fsdp_testing.suites.schedules import forward, iterations, micro_batch

_FULL = frozenset({"full_state_dict"})
_SHARDED = frozenset({"sharded_state_dict"})
_LOCAL = frozenset({"local_state_dict"})
_OPTIMIZER = _FULL | {"optim_state"}
_SOURCE = "torch.distributed.checkpoint.state_dict"
_DECAYED = OptimizerSpec("sgd", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1})


def _model(form: str, *models: str) -> Builder:
    """Trained, saved and loaded without the optimizer, trained on."""

    def build(place: Place) -> Iterable[Case]:
        for model in models:
            reload = Reload(form, optimizer=False)
            yield place.case(model, *iterations(1), reload, Observe(), *iterations(1, first=1), optimizer=PLAIN_SGD)

    return build


def _before_training(form: str) -> Builder:
    def build(place: Place) -> Iterable[Case]:
        yield place.case("mlp", Reload(form, optimizer=False), Observe(), *iterations(1), optimizer=PLAIN_SGD)

    return build


def _other_wrapping(place: Place) -> Iterable[Case]:
    # To the root alone, and from there to another unit.
    there, back = (Reload("full", optimizer=False, units=units) for units in ((), ("layers.1",)))
    program = (*iterations(1), there, Observe(), *iterations(1, first=1), back, *iterations(1, first=2))
    yield place.case("mlp", *program, optimizer=PLAIN_SGD)


def _moved_model(place: Place) -> Iterable[Case]:
    yield place.case("uneven", *iterations(1), optimizer=PLAIN_SGD)


def _trained(form: str) -> Builder:
    def build(place: Place) -> Iterable[Case]:
        program = (*iterations(2), Reload(form), Observe(), *iterations(2, first=2))
        for optimizer in (ADAMW, _DECAYED) if form == "full" else (ADAMW,):
            yield place.case("uneven", *program, optimizer=optimizer)

    return build


def _learning_rate(place: Place) -> Iterable[Case]:
    changed = (SetLr(0.2), Reload(), *iterations(2, first=1))
    yield place.case("mlp", *iterations(1), *changed, SetLr(0.0), Reload(), *iterations(1, 3), optimizer=MOMENTUM)


def _other_units(place: Place) -> Iterable[Case]:
    there, back = Reload(units=()), Reload(units=("layers.2",))
    program = (*iterations(2), there, Observe(), *iterations(1, first=2), back, *iterations(1, first=3))
    yield place.case("mlp", *program, optimizer=ADAMW)


def _before_first_step(place: Place) -> Iterable[Case]:
    yield place.case("mlp", Reload(), Observe(), *iterations(2), optimizer=ADAMW)


def _twice(place: Place) -> Iterable[Case]:
    program = (*iterations(1), Reload(), *iterations(1, first=1), Reload(), micro_batch(2), Step(), forward(3))
    yield place.case("mlp", *program, optimizer=ADAMW)


def _stateless(place: Place) -> Iterable[Case]:
    program = (*iterations(1), SetLr(0.02), Reload(), *iterations(1, first=1))
    yield place.case("mlp", *program, optimizer=PLAIN_SGD)


def _frozen(place: Place) -> Iterable[Case]:
    yield place.case("frozen_body", *iterations(2), Reload(), Observe(), *iterations(1, first=2), optimizer=ADAMW)


def _shared(place: Place) -> Iterable[Case]:
    yield place.case("tied_within", *iterations(2), Reload(), Observe(), *iterations(1, first=2), optimizer=ADAMW)


def _moved_optimizer(place: Place) -> Iterable[Case]:
    yield place.case("uneven", *iterations(1), SetLr(0.02), *iterations(1, first=1), optimizer=ADAMW)


MODEL_CHECKS = (
    Check(
        "full_state_dict.fresh_instance",
        "A saved model, loaded into a fresh instance, has its values and trains on.",
        _SOURCE,
        _model("full", "uneven", "embedding"),
        _FULL,
    ),
    Check(
        "full_state_dict.before_training",
        "A model can be saved and loaded before its first forward.",
        "pytorch PR 90862",
        _before_training("full"),
        _FULL,
    ),
    Check(
        "full_state_dict.buffers",
        "Buffers are saved and loaded with the parameters, in their dtypes.",
        "pytorch issue 93391",
        _model("full", "buffers"),
        _FULL | {"buffers"},
    ),
    Check(
        "full_state_dict.shared_parameters",
        "Parameters under two names, and units under two names, are saved and loaded as one.",
        "pytorch PR 98912, 99448",
        _model("full", "tied_within", "registered_twice"),
        _FULL | {"shared_parameters", "reused_modules"},
    ),
    Check(
        "full_state_dict.other_wrapping",
        "What one wrapping saved another one loads.",
        "pytorch PR 90933",
        _other_wrapping,
        _FULL | {"nested_wrapping"},
    ),
    Check(
        "full_state_dict.other_world_size",
        "What N ranks saved N+1 ranks load and train, and N ranks again after them.",
        _SOURCE,
        _moved_model,
        _FULL,
        judge=partial(judge_moved, optimizer=False),
    ),
    Check(
        "sharded_state_dict.fresh_instance",
        "A model saved in shards, loaded into a fresh instance, has its values and trains on.",
        _SOURCE,
        _model("sharded", "mlp", "uneven"),
        _SHARDED,
    ),
    Check(
        "sharded_state_dict.before_training",
        "A model can be saved and loaded in shards before its first forward.",
        "pytorch PR 90862",
        _before_training("sharded"),
        _SHARDED,
    ),
    Check(
        "sharded_state_dict.buffers",
        "Buffers are saved and loaded with the shards.",
        _SOURCE,
        _model("sharded", "buffers"),
        _SHARDED | {"buffers"},
    ),
    Check(
        "local_state_dict.fresh_instance",
        "Raw shards, loaded on the rank that saved them, give the model back.",
        "torch.distributed.fsdp.LocalStateDictConfig; pytorch PR 94109",
        _model("local", "mlp", "uneven"),
        _LOCAL,
    ),
)

OPTIMIZER_CHECKS = (
    Check(
        "optim_state.fresh_instance",
        "Model and optimizer, loaded into fresh instances, go on as if they had never been saved.",
        _SOURCE,
        _trained("full"),
        _OPTIMIZER,
    ),
    Check(
        "optim_state.sharded_model",
        "The same with the model saved in shards.",
        _SOURCE,
        _trained("sharded"),
        _OPTIMIZER | _SHARDED,
    ),
    Check(
        "optim_state.learning_rate",
        "The learning rate at the time of saving is restored, zero included.",
        "pytorch PR 128685",
        _learning_rate,
        _OPTIMIZER,
    ),
    Check(
        "optim_state.other_wrapping",
        "Optimizer state that one wrapping saved another one loads.",
        _SOURCE,
        _other_units,
        _OPTIMIZER | {"nested_wrapping"},
    ),
    Check(
        "optim_state.other_world_size",
        "Optimizer state that N ranks saved N+1 ranks load and train, and N ranks again after them.",
        _SOURCE,
        _moved_optimizer,
        _OPTIMIZER,
        judge=judge_moved,
    ),
    Check(
        "optim_state.before_first_step",
        "An optimizer that never stepped can be saved and loaded, and its step counts start at zero.",
        "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict",
        _before_first_step,
        _OPTIMIZER,
    ),
    Check(
        "optim_state.without_state",
        "An optimizer that keeps no state can be saved and loaded, with its learning rate.",
        "torch.optim.SGD without momentum",
        _stateless,
        _OPTIMIZER,
    ),
    Check(
        "optim_state.repeatedly",
        "Saved and loaded after every step, training is the same.",
        _SOURCE,
        _twice,
        _OPTIMIZER | {"forward_only"},
    ),
    Check(
        "optim_state.frozen_parameters",
        "Frozen parameters have no optimizer state, and loading gives them none.",
        "pytorch PR 76671",
        _frozen,
        _OPTIMIZER | {"frozen_parameters"},
    ),
    Check(
        "optim_state.shared_parameters",
        "A shared parameter has one optimizer state.",
        "pytorch issue 128011, PR 128685",
        _shared,
        _OPTIMIZER | {"shared_parameters"},
    ),
)

CHECKS = MODEL_CHECKS + OPTIMIZER_CHECKS
