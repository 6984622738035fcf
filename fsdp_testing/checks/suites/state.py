"""A model's state: what is loaded equals what was saved, in a fresh instance, another wrapping, another number of ranks.

Loading is judged by what follows: the loaded model has the saved values, and continues training as if it had never been saved.
The loading instance was built from other values, so nothing comes from its construction.
"""

from __future__ import annotations

from functools import partial

from fsdp_testing.cases.operations import Operation, Restore, Save, Step, ZeroGrad
from fsdp_testing.cases.records import (
    Case,
    MixedPrecisionSpec,
    Observe,
    OptimizerSpec,
    Reload,
    WrappingPlan,
)
from fsdp_testing.checks.suites.check import (
    LOCKSTEP,
    ODD,
    PLAIN_SGD,
    Check,
    cases,
    check,
    forward,
    iteration,
    iterations,
    micro_batch,
    no_sync_batch,
)
from fsdp_testing.checks.suites.loading_programs import IN_DTENSORS, KEEPS_EXTRA_STATE, KEEPS_VERSIONS, keeps_modes
from fsdp_testing.checks.suites.other_worlds import judge_moved
from fsdp_testing.checks.suites.state_programs import (
    OF_ANOTHER_MODEL,
    OF_ANOTHER_RANK,
    REFUSED,
    SHARDS_PLACED,
    WRONG_IN_SHARDS,
    WRONG_RAW,
    WRONG_STATES,
    loads_and_trains,
    not_finite,
    through_directory,
)

NESTED = {"nested_wrapping"}


def _model(form: str, models: str) -> tuple[Case, ...]:
    """Trained, saved and loaded without the optimizer, trained on."""
    program = (*iteration(0), Reload(form, optimizer=False), Observe(), *iteration(1))
    return cases(models, *program, optimizer=PLAIN_SGD)


def _before_training(form: str) -> tuple[Case, ...]:
    return cases("mlp", Reload(form, optimizer=False), Observe(), *iteration(0), optimizer=PLAIN_SGD)


def rolled_back(
    form: str, models: str, *between: Operation, optimizer: OptimizerSpec | None = None
) -> tuple[Case, ...]:
    """Trained, saved, trained on, loaded into the same model, and trained on from there."""
    program = (
        *iteration(0),
        Save(form, optimizer is not None),
        *iteration(1),
        *between,
        Restore(),
        Observe(),
        *iteration(2),
    )
    return cases(models, *program, optimizer=optimizer or PLAIN_SGD)


LOW = (MixedPrecisionSpec("bfloat16"), MixedPrecisionSpec("bfloat16", "float32"), MixedPrecisionSpec(None, "bfloat16"))

saved = partial(check, source="torch.distributed.checkpoint.state_dict")

CHECKS: tuple[Check, ...] = (
    saved("full_state_dict.fresh_instance", "A saved model, loaded into a fresh instance, has its values and trains on.",
          _model("full", "uneven embedding"), sizes=ODD),
    saved("full_state_dict.saved_again", "Each save holds the current values, whatever is frozen.",
          *(cases("mlp", Save(), *iteration(0), Save(), Save(), *iteration(1), Save(), Reload(optimizer=False), Observe(),
                  optimizer=PLAIN_SGD, freeze=freeze) for freeze in ((), ("layers.0.*",)))),
    saved("full_state_dict.saved_after_forward", "A forward before the step changes nothing that is saved after it.",
          cases("mlp", micro_batch(0), forward(5, "train"), Step(), Save(), Observe(), optimizer=PLAIN_SGD)),
    saved("sharded_state_dict.saved_again", "Loading restores the values that shards held at the second save.",
          *(cases("mlp", Save("sharded"), *iteration(0), *after, Reload("sharded", optimizer=False), Observe(),
                  optimizer=PLAIN_SGD, freeze=freeze)
            for freeze, after in (((), ()), (("layers.0.*",), ()), ((), (forward(5),))))),
    saved("full_state_dict.before_training", "A model can be saved and loaded before its first forward.",
          _before_training("full"), source="pytorch PR 90862"),
    saved("full_state_dict.rolled_back", "Loading a saved state brings back a model that was trained further since.",
          rolled_back("full", "uneven buffers"), source="torch.nn.Module.load_state_dict", sizes=ODD),
    saved("full_state_dict.rolled_back_after_evaluation", "State loads into a model that has only run a forward since.",
          rolled_back("full", "mlp uneven", forward(5)), source="torch.nn.Module.load_state_dict"),
    *(saved(f"{form}_state_dict.beside_gradients", "Loading leaves gradients as they are, and later ones are added to them.",
            cases("mlp uneven", *iteration(0), Save(form), micro_batch(1), Restore(keeps_gradients=True), Observe(),
                  micro_batch(2), Observe(), Step(), ZeroGrad(), *iteration(3), optimizer=PLAIN_SGD),
            cases("mlp", *iteration(0), Save(form), no_sync_batch(1), Restore(keeps_gradients=True), micro_batch(2), Observe(),
                  Step(), optimizer=PLAIN_SGD),
            source="torch.nn.Module.load_state_dict", needs={"full_state_dict", "accumulate_without_no_sync"}, sizes=ODD)
      for form in ("full", "sharded")),
    *(saved(f"{form}_state_dict.not_aliased", "Training after a load leaves the state that the user passed as it is.",
            cases("mlp buffers", *iteration(0), optimizer=PLAIN_SGD), source="torch.nn.Module.load_state_dict",
            needs={"full_state_dict", f"{form}_state_dict"}, mode=loads_and_trains(form), sizes=ODD)
      for form in ("full", "sharded")),
    saved("full_state_dict.buffers", "Buffers are saved and loaded with the parameters, in their dtypes.",
          _model("full", "buffers"), source="pytorch issue 93391"),
    saved("full_state_dict.module_versions", "Modules convert states of an older version of theirs, and those alone.",
          cases("versioned", *iteration(0), optimizer=PLAIN_SGD), source="torch.nn.Module.load_state_dict",
          needs={"full_state_dict", "module_versions"}, mode=KEEPS_VERSIONS, sizes=ODD),
    saved("full_state_dict.extra_state", "What modules return from `get_extra_state` is saved and loaded.",
          cases("extra_state", *iteration(0), optimizer=PLAIN_SGD), source="torch.nn.Module.get_extra_state",
          needs={"full_state_dict", "extra_state"}, mode=KEEPS_EXTRA_STATE),
    *(saved(f"{form}_state_dict.modes", "Saving and loading leave modules in training or in evaluation, as they were.",
            cases("deep_nest", *iteration(0), optimizer=PLAIN_SGD), source="torch.nn.Module.train",
            needs={f"{form}_state_dict"}, mode=keeps_modes(form)) for form in ("full", "sharded")),
    saved("full_state_dict.strict", "A state with a missing parameter, an extra one or one of another shape is "
        "refused.",
          *(cases("mlp", *iteration(0), Observe(wrong)) for wrong in WRONG_STATES),
          source="torch.nn.Module.load_state_dict, strict",
          needs={"full_state_dict", "strict_state"}, mode=REFUSED),
    saved("sharded_state_dict.strict", "A state in shards with a missing or an extra parameter is refused.",
          *(cases("mlp", *iteration(0), Observe(wrong)) for wrong in WRONG_IN_SHARDS),
          source="torch.nn.Module.load_state_dict, strict",
          needs={"sharded_state_dict", "strict_state"}, mode=REFUSED),
    saved("sharded_state_dict.other_shapes", "A state in shards of a model with other shapes is refused.",
          cases("mlp", *iteration(0), Observe(OF_ANOTHER_MODEL["sharded"])),
          source="torch.nn.Module.load_state_dict, strict",
          needs={"sharded_state_dict", "strict_state"}, mode=REFUSED, sizes=ODD),
    saved("local_state_dict.strict", "A raw state with a missing shard, an extra one or shards of other sizes is refused.",
          *(cases("mlp", *iteration(0), Observe(wrong)) for wrong in (*WRONG_RAW, OF_ANOTHER_MODEL["local"])),
          source="torch.nn.Module.load_state_dict, strict",
          needs={"local_state_dict", "strict_state"}, mode=REFUSED, sizes=ODD),
    *(saved(f"{form}_state_dict.of_another_rank", f"A {form} state that another rank saved is refused.",
            cases("mlp", *iteration(0), Observe(OF_ANOTHER_RANK[form])), source="torch.nn.Module.load_state_dict",
            needs={f"{form}_state_dict", "strict_state"}, strategies=("full_shard",), mode=REFUSED, sizes=ODD)
      for form in OF_ANOTHER_RANK),
    *(saved(f"{form}_state_dict.through_directory",
            f"A {form} state that torch.distributed.checkpoint saved and loaded restores the model.",
            cases("uneven", *iteration(0)), needs={f"{form}_state_dict", "full_state_dict"}, mode=through_directory(form),
            sizes=ODD)
      for form in OF_ANOTHER_RANK),
    *(saved(f"{form}_state_dict.one_unit", f"A model that is one unit is saved and loaded in {form} form.",
            cases("uneven", *iterations(2), Reload(form), *iteration(2), wrapping=WrappingPlan()),
            source="torch.nn.Module.load_state_dict", sizes=ODD) for form in ("full", "sharded", "local")),
    *(saved(f"{form}_state_dict.not_finite", f"Elements that are NaN or infinite are saved and loaded in {form} form.",
            cases("mlp uneven", *iteration(0), optimizer=PLAIN_SGD), source="torch.nn.Module.load_state_dict",
            needs={f"{form}_state_dict", "full_state_dict"}, mode=not_finite(form), of_pieces=True)
      for form in ("full", "sharded", "local")),
    saved("full_state_dict.in_dtensors", "A full state whose values are DTensors is loaded as it is, or refused.",
          cases("mlp", *iteration(0), optimizer=PLAIN_SGD), source="torch.nn.Module.load_state_dict", mode=IN_DTENSORS,
          needs={"full_state_dict"}, sizes=ODD),
    saved("full_state_dict.dtypes", "Saved values have the storage dtype of parameters, not the compute dtype.",
          *(cases("mlp uneven", *iteration(0), Save(), micro_batch(1), Save(), dtype="float32", optimizer=PLAIN_SGD,
                  precision=precision) for precision in LOW),
          source="torch.distributed.fsdp.MixedPrecision", comparison=LOCKSTEP),
    saved("full_state_dict.buffer_dtypes", "Saved buffers have the dtype that they had when the model was built.",
          cases("buffers", *iteration(0), Save(), *iteration(1), dtype="float32", optimizer=PLAIN_SGD,
                precision=MixedPrecisionSpec(buffer_dtype="bfloat16")),
          source="torch.distributed.fsdp.MixedPrecision", comparison=LOCKSTEP),
    saved("full_state_dict.shared_parameters",
          "Parameters under two names, and units under two names, are saved and loaded as one.",
          _model("full", "tied_within registered_twice"), source="pytorch PR 98912, 99448"),
    # To the root alone, and from there to another unit.
    saved("full_state_dict.other_wrapping", "State saved under one wrapping loads under another.",
          cases("mlp", *iteration(0), Reload("full", optimizer=False, units=()), Observe(),
                *iteration(1), Reload("full", optimizer=False, units=("layers.1",)), *iteration(2), optimizer=PLAIN_SGD),
          source="pytorch PR 90933", needs=NESTED),
    saved("full_state_dict.other_world_size", "State of N ranks loads and trains on N+1 ranks, and then on N ranks again.",
          cases("uneven", *iteration(0), Save(), optimizer=PLAIN_SGD),
          needs={"full_state_dict"}, judge=partial(judge_moved, optimizer=False)),
    saved("sharded_state_dict.fresh_instance",
          "A model saved in shards, loaded into a fresh instance, has its values and trains on.",
          _model("sharded", "mlp uneven"), sizes=ODD),
    saved("sharded_state_dict.before_training", "A model can be saved and loaded in shards before its first forward.",
          _before_training("sharded"), source="pytorch PR 90862"),
    saved("sharded_state_dict.rolled_back",
          "Loading a state in shards brings back a model that was trained further since.",
          rolled_back("sharded", "mlp uneven"), rolled_back("sharded", "mlp", forward(5)),
          source="torch.nn.Module.load_state_dict", sizes=ODD),
    *(saved(f"sharded_state_dict.whole{of}", f"Shards of {what} hold the elements that they say they do.",
            cases(model, forward(0, "no_grad")), needs={"full_state_dict", "sharded_state_dict"}, mode=SHARDS_PLACED, sizes=ODD)
      for of, what, model in (("", "parameters", "uneven"), ("_strided", "weights that are not contiguous", "strided"))),
    saved("sharded_state_dict.buffers", "Buffers are saved and loaded with the shards.", _model("sharded", "buffers")),
    saved("local_state_dict.fresh_instance", "Raw shards, loaded on the rank that saved them, restore the model.",
          _model("local", "mlp uneven"), source="torch.distributed.fsdp.LocalStateDictConfig; pytorch PR 94109", sizes=ODD),
    saved("local_state_dict.rolled_back", "Raw shards, loaded into the model that was trained on since, restore it.",
          rolled_back("local", "mlp uneven"), source="torch.distributed.fsdp.LocalStateDictConfig", sizes=ODD),
)  # fmt: skip
"""A model's state, whole, in shards and raw."""
