"""Sound implementations hold in every cell; of each planted fault the cell says which entry differs first; the rest holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.search.checkpoints.exchange import Exchange, Plan, Result

SOUND = "single-process"
ADAMW = "adamw, two groups"
MOMENTUM = "momentum, shared weight"
SCHEDULED = "schedule, random numbers"
BFLOAT16 = "bfloat16, moments in float32"


def exchanged(*names: str, **options: object) -> list[Result]:
    adapters = tuple(
        registry.load(name if name.startswith(("single", "torch")) else f"checkpoint_faults:{name}") for name in names
    )
    plan = Plan(adapters, **{"sizes": (2,), "subjects": (ADAMW,), "ways": ("memory",), **options})
    return Exchange(plan, default_pool()).run()


LOADING = {
    "LOSES_MOMENT": "loading: exp_avg of outer.w.weight is missing",
    "LOSES_STATE": "loading: exp_avg of outer.inner.w.bias is missing",
    "SWAPS_MOMENTS": "loading: exp_avg of outer.w.bias, element 0: got ",
    "FORGETS_STEP": "loading: step of first.w.weight: got 0.0, expected 2.0",
    "IGNORES_RATE": "loading: lr of first.w.weight: got 0.3, expected 0.02",
    "FIRST_RANK_ONLY": "loading: parameter first.w.weight, element 0: ranks 0 and 1 hold different numbers",
    "LEAVES_ONE_OUT": "loading: parameter outer.w.weight, element 0: got ",
}


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str], Result]:
    """Who loads what, of a sound implementation and of one for each fault."""
    found = exchanged(SOUND, *LOADING, "SAVES_WRONG", "SAVES_DIFFERENTLY", "REFUSES")
    return {(one.saver.split()[0], one.loader.split(" ")[0]): one for one in found}


def test_without_a_fault_all_holds(results: dict[tuple[str, str], Result]):
    sound = [(SOUND, ""), (SOUND, SOUND), ("refuses", SOUND), (SOUND, "saves-wrong")]
    assert [results[pair].mark for pair in sound] == ["="] * 4


@pytest.mark.parametrize("name", LOADING)
def test_of_a_loader_with_a_fault_every_cell_fails_and_names_the_entry(
    name: str, results: dict[tuple[str, str], Result]
):
    loader = name.lower().replace("_", "-")
    for saver in (SOUND, "refuses", loader):
        found = results[saver, loader]
        assert found.mark == "X"
        assert found.reason.startswith(LOADING[name]), found
    assert results[loader, ""].mark == results[loader, SOUND].mark == "="


def test_what_was_saved_wrong_is_told_of_the_saver_in_its_row(results: dict[tuple[str, str], Result]):
    row = [one for (saver, _), one in results.items() if saver == "saves-wrong"]
    assert len(row) == len(LOADING) + 5
    assert {one.mark for one in row} == {"X"}
    assert all(one.reason.startswith("saving: exp_avg of outer.w.bias, element 2: got ") for one in row)


def test_what_a_state_has_too_much_and_what_loading_thaws_is_told():
    found = exchanged("SAVES_A_MASK", "SAVES_A_GHOST", "THAWS", subjects=("frozen part",))
    of = {(one.saver.split()[0], one.loader.split(" ")[0]): one for one in found}
    assert of["saves-a-mask", ""].reason == "saving: outer.mask is no parameter or buffer of the model"
    assert of["saves-a-ghost", ""].reason == "saving: ghost is no parameter or buffer of the model"
    assert of["thaws", "thaws"].reason.startswith(
        "further step: parameter first.w.weight, element 0: ranks 0 and 1 hold"
    )
    assert {of[cell].mark for cell in (("saves-a-mask", ""), ("saves-a-ghost", ""), ("thaws", "thaws"))} == {"X"}


@pytest.mark.parametrize("name", ["fsdp_ref-flat", "torch-fsdp1-flat"])
def test_flat_parameters_have_the_settings_of_what_they_hold(name: str):
    assert {one.mark for one in _of_flat(name)} == {"="}


def _of_flat(name: str) -> list[Result]:
    plan = Plan((registry.load(name),), sizes=(2,), subjects=(MOMENTUM, "no state"), ways=("memory",))
    return Exchange(plan, default_pool()).run()


def test_layouts_without_inner_units_are_asked_and_others_are_named():
    sound = registry.load(SOUND)
    plain = replace(
        sound, name="plain", capabilities=sound.capabilities - {"nested_wrapping", "hybrid"} | {"full_shard"}
    )
    plan = Plan((plain,), sizes=(2, 3, 4))
    assert {place.layout.name for place in plan.places()} == {
        f"{strategy}/root" for strategy in ("no_shard/2", "no_shard/3", "full_shard/2", "full_shard/3", "full_shard/4")
    }
    lines = plan.not_asked()
    assert "plain: shard_grad_op/2/root; it needs shard_grad_op" in lines
    assert "plain: hybrid_shard/2x2/root; it needs hybrid" in lines


def test_saving_that_changes_the_next_step_is_found(results: dict[tuple[str, str], Result]):
    found = results["saves-differently", ""]
    assert found.mark == "X"
    assert found.reason.startswith("further step: ")


LATER_SUBJECTS = {
    (
        "clears-first",
        "",
        ADAMW,
    ): "saving changes what is trained: exp_avg of first.w.weight, element 0: got 0.0, expected ",
    ("clears-first", "", BFLOAT16): "saving changes what is trained: exp_avg of first.w.weight, element 0: got 0.0, ",
    ("draws-numbers", "", SCHEDULED): "saving changes what is trained: random numbers of rank 0, element ",
    (SOUND, "forgets-first-rate", SCHEDULED): "loading: initial_lr of first.w.weight: got 0.3, expected 0.02",
    (SOUND, "doubles-rate", SCHEDULED): "further step: _last_lr of the schedule: got ",
    (
        SOUND,
        "narrow-moments",
        BFLOAT16,
    ): "loading: exp_avg of first.w.weight: got torch.bfloat16, expected torch.float32",
}


def test_schedules_random_numbers_and_dtypes_are_compared_and_what_saving_changes():
    names = ("CLEARS_FIRST", "DRAWS_NUMBERS", "FORGETS_FIRST_RATE", "DOUBLES_RATE", "NARROW_MOMENTS")
    results = exchanged(SOUND, *names, subjects=(ADAMW, SCHEDULED, BFLOAT16))
    found = {(one.saver.split()[0], one.loader.split(" ")[0], one.subject): one for one in results}
    for cell, reason in LATER_SUBJECTS.items():
        assert found[cell].mark == "X"
        assert found[cell].reason.startswith(reason), found[cell]
    # What a fault does not touch holds, and so does everything without one.
    for loader in (SOUND, "clears-first", "draws-numbers"):
        assert {found[SOUND, loader, subject].mark for subject in (ADAMW, SCHEDULED, BFLOAT16)} == {"="}
    assert {found[SOUND, "narrow-moments", subject].mark for subject in (ADAMW, SCHEDULED)} == {"="}
    assert {found[SOUND, "forgets-first-rate", subject].mark for subject in (ADAMW, BFLOAT16)} == {"="}


@pytest.mark.parametrize("way", ["file", "dcp"])
def test_ranks_take_up_random_numbers_of_other_numbers_of_ranks(way: str):
    found = exchanged(SOUND, sizes=(2, 3), subjects=(SCHEDULED,), ways=(way,))
    assert [one.mark for one in found] == ["="] * 6


def test_an_error_on_every_rank_is_a_refusal(results: dict[tuple[str, str], Result]):
    found = results[SOUND, "refuses"]
    assert found.mark == "r"
    assert found.reason == "loading: ValueError: this state is of another model"


def test_a_death_and_a_lone_error_stay_in_their_own_cells():
    found = exchanged(SOUND, "DIES", "REFUSES_ON_ONE", "TRAINS_DIFFERENTLY", subjects=(MOMENTUM,))
    of = {(one.saver.split()[0], one.loader.split(" ")[0]): one for one in found}
    assert of[SOUND, SOUND].mark == of["dies", SOUND].mark == "="
    assert {of[saver, ""].mark for saver in (SOUND, "dies", "refuses-on-one")} == {"="}
    for loader, word in (("dies", "died by SIGKILL"), ("refuses-on-one", "only on rank 1 of 2: loading: ")):
        assert {of[saver, loader].mark for saver in (SOUND, "refuses-on-one")} == {"X"}
        assert word in of[SOUND, loader].reason
    found_later = of[SOUND, "trains-differently"]
    assert found_later.mark == "X"
    assert found_later.reason.startswith("further step: ")


@pytest.mark.slow  # tests/acceptance/contract: checkpoints-hung always
def test_a_hang_ends_and_fails():
    (found,) = [one for one in exchanged("HANGS", subjects=(MOMENTUM,), deadline=5.0) if one.loader]
    assert found.mark == "X"
    assert "hung" in found.reason


def test_numbers_that_change_while_a_directory_is_written_do_not_get_into_it():
    """Shards that are the parameters themselves, and a state that is trained on before its files are written."""
    found = exchanged("torch-fsdp2", subjects=(ADAMW,), ways=("async",))
    assert [one.mark for one in found] == ["="] * 6
