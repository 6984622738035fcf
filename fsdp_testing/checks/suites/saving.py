"""State: what was saved is what is loaded, into a fresh instance, another wrapping, another number of ranks.

Loading is judged by what comes after it: the loaded model has the saved values, and goes on training as if it had never
been saved. The instance that loads was built from other values, so that nothing comes from its construction.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from fsdp_testing.cases.operations import Save, TrainElsewhere
from fsdp_testing.cases.operations.reloading import ELSEWHERE
from fsdp_testing.cases.records import Batch, Case, Observe, OptimizerSpec, Reload, SetLr, Step
from fsdp_testing.checks.suites.check import ADAMW, MOMENTUM, PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.moving import judge_moved
from fsdp_testing.checks.suites.schedules import forward, iteration, iterations, micro_batch

_DECAYED = OptimizerSpec("sgd", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1})


def _model(form: str, models: tuple[str, ...], place: Place) -> Iterable[Case]:
    """Trained, saved and loaded without the optimizer, trained on."""
    for model in models:
        reload = Reload(form, optimizer=False)
        yield place.case(model, *iteration(0), reload, Observe(), *iteration(1), optimizer=PLAIN_SGD)


def _before_training(form: str, place: Place) -> Iterable[Case]:
    yield place.case("mlp", Reload(form, optimizer=False), Observe(), *iteration(0), optimizer=PLAIN_SGD)


def _trained(form: str, place: Place) -> Iterable[Case]:
    program = (*iterations(2), Reload(form), Observe(), *iterations(2, first=2))
    for optimizer in (ADAMW, _DECAYED) if form == "full" else (ADAMW,):
        yield place.case("uneven", *program, optimizer=optimizer)


SUITE = Suite(source="torch.distributed.checkpoint.state_dict")

SUITE.add(
    "full_state_dict.fresh_instance",
    "A saved model, loaded into a fresh instance, has its values and trains on.",
    partial(_model, "full", ("uneven", "embedding")),
)


@SUITE.check("full_state_dict.saved_again")
def _saved_again(place: Place) -> Iterable[Case]:
    """Every save holds the values of its own moment, whatever is frozen."""
    for freeze in ((), ("layers.0.*",)):
        program = (Save(), *iteration(0), Save(), Save(), *iteration(1), Save(), Reload(optimizer=False), Observe())
        yield place.case("mlp", *program, optimizer=PLAIN_SGD, freeze=freeze)


@SUITE.check("sharded_state_dict.saved_again")
def _sharded_again(place: Place) -> Iterable[Case]:
    """What shards hold at the second save is what is loaded."""
    for freeze in ((), ("layers.0.*",)):
        program = (Save("sharded"), *iteration(0), Reload("sharded", optimizer=False), Observe())
        yield place.case("mlp", *program, optimizer=PLAIN_SGD, freeze=freeze)


SUITE.add(
    "full_state_dict.before_training",
    "A model can be saved and loaded before its first forward.",
    partial(_before_training, "full"),
    source="pytorch PR 90862",
)
SUITE.add(
    "full_state_dict.buffers",
    "Buffers are saved and loaded with the parameters, in their dtypes.",
    partial(_model, "full", ("buffers",)),
    source="pytorch issue 93391",
)
SUITE.add(
    "full_state_dict.shared_parameters",
    "Parameters under two names, and units under two names, are saved and loaded as one.",
    partial(_model, "full", ("tied_within", "registered_twice")),
    source="pytorch PR 98912, 99448",
)


@SUITE.check("full_state_dict.other_wrapping", source="pytorch PR 90933", needs={"nested_wrapping"})
def _other_wrapping(place: Place) -> Iterable[Case]:
    """What one wrapping saved another one loads."""
    # To the root alone, and from there to another unit.
    there, back = (Reload("full", optimizer=False, units=units) for units in ((), ("layers.1",)))
    program = (*iteration(0), there, Observe(), *iteration(1), back, *iteration(2))
    yield place.case("mlp", *program, optimizer=PLAIN_SGD)


@SUITE.check("full_state_dict.other_world_size", needs={"full_state_dict"}, judge=partial(judge_moved, optimizer=False))
def _moved_model(place: Place) -> Iterable[Case]:
    """What N ranks saved N+1 ranks load and train, and N ranks again after them."""
    yield place.case("uneven", *iteration(0), optimizer=PLAIN_SGD)


SUITE.add(
    "sharded_state_dict.fresh_instance",
    "A model saved in shards, loaded into a fresh instance, has its values and trains on.",
    partial(_model, "sharded", ("mlp", "uneven")),
)
SUITE.add(
    "sharded_state_dict.before_training",
    "A model can be saved and loaded in shards before its first forward.",
    partial(_before_training, "sharded"),
    source="pytorch PR 90862",
)
SUITE.add(
    "sharded_state_dict.buffers",
    "Buffers are saved and loaded with the shards.",
    partial(_model, "sharded", ("buffers",)),
)
SUITE.add(
    "local_state_dict.fresh_instance",
    "Raw shards, loaded on the rank that saved them, give the model back.",
    partial(_model, "local", ("mlp", "uneven")),
    source="torch.distributed.fsdp.LocalStateDictConfig; pytorch PR 94109",
)
SUITE.add(
    "optim_state.fresh_instance",
    "Model and optimizer, loaded into fresh instances, go on as if they had never been saved.",
    partial(_trained, "full"),
)
SUITE.add(
    "optim_state.sharded_model",
    "The same with the model saved in shards.",
    partial(_trained, "sharded"),
    needs={"full_state_dict"},
)


@SUITE.check("optim_state.learning_rate", source="pytorch PR 128685")
def _learning_rate(place: Place) -> Iterable[Case]:
    """The learning rate at the time of saving is restored, zero included."""
    changed = (SetLr(0.2), Reload(), *iterations(2, first=1))
    yield place.case("mlp", *iteration(0), *changed, SetLr(0.0), Reload(), *iterations(1, 3), optimizer=MOMENTUM)


@SUITE.check("optim_state.other_wrapping", needs={"nested_wrapping"})
def _other_units(place: Place) -> Iterable[Case]:
    """Optimizer state that one wrapping saved another one loads."""
    there, back = Reload(units=()), Reload(units=("layers.2",))
    program = (*iterations(2), there, Observe(), *iteration(2), back, *iteration(3))
    yield place.case("mlp", *program, optimizer=ADAMW)


@SUITE.check("optim_state.other_world_size", needs={"full_state_dict", "optim_state"}, judge=judge_moved)
def _moved_optimizer(place: Place) -> Iterable[Case]:
    """Optimizer state that N ranks saved N+1 ranks load and train, and N ranks again after them."""
    yield place.case("uneven", *iteration(0), SetLr(0.02), *iteration(1), optimizer=ADAMW)


@SUITE.check("optim_state.some_ranks", needs={"full_state_dict", "optim_state", "sub_groups"})
def _some_ranks(place: Place) -> Iterable[Case]:
    """Model and optimizer of all ranks some of them load and train, and all of them what those saved."""
    strategy = place.strategy if place.strategy in ELSEWHERE else "full_shard"
    for last in (False, True):
        elsewhere = TrainElsewhere(Batch(7), place.world_size - 1, last, strategy=strategy)
        yield place.case("uneven", *iterations(2), elsewhere, Observe(), *iteration(2), optimizer=ADAMW)


@SUITE.check("optim_state.before_first_step", source="torch.distributed.checkpoint.state_dict.get_optimizer_state_dict")
def _before_first_step(place: Place) -> Iterable[Case]:
    """An optimizer that never stepped can be saved and loaded, and its step counts start at zero."""
    yield place.case("mlp", Reload(), Observe(), *iterations(2), optimizer=ADAMW)


@SUITE.check("optim_state.without_state", source="torch.optim.SGD without momentum")
def _stateless(place: Place) -> Iterable[Case]:
    """An optimizer that keeps no state can be saved and loaded, with its learning rate."""
    program = (*iteration(0), SetLr(0.02), Reload(), *iteration(1))
    yield place.case("mlp", *program, optimizer=PLAIN_SGD)


@SUITE.check("optim_state.repeatedly")
def _twice(place: Place) -> Iterable[Case]:
    """Saved and loaded after every step, training is the same."""
    program = (*iteration(0), Reload(), *iteration(1), Reload(), micro_batch(2), Step(), forward(3))
    yield place.case("mlp", *program, optimizer=ADAMW)


@SUITE.check("optim_state.frozen_parameters", source="pytorch PR 76671")
def _frozen(place: Place) -> Iterable[Case]:
    """Frozen parameters have no optimizer state, and loading gives them none."""
    yield place.case("frozen_body", *iterations(2), Reload(), Observe(), *iteration(2), optimizer=ADAMW)


@SUITE.check("optim_state.shared_parameters", source="pytorch issue 128011, PR 128685")
def _shared(place: Place) -> Iterable[Case]:
    """A shared parameter has one optimizer state."""
    yield place.case("tied_within", *iterations(2), Reload(), Observe(), *iteration(2), optimizer=ADAMW)
