"""One rule for every door: the situations, what each door must say of each, and why some cannot be expressed at some.

`python tests/acceptance/contract/table.py` runs every cell and prints the table, expected and actual.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[1] / "sessions"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # ranks take it over

import contract_faults as faults  # noqa: E402 - the folder is on the path now
import doors  # noqa: E402 - as above
import pytest  # noqa: E402 - as above
from doors import Ended, Given  # noqa: E402 - as above

from fsdp_testing.cases.records import Verdict  # noqa: E402 - as above

PASS, FAIL, UNKNOWN = Ended("pass", 0), Ended("fail", 1), Ended("unknown", 3)
EXPECTED, NOT_CLAIMED = Ended("expected", 0), Ended("not claimed", 3)


class Situation(NamedTuple):
    """What happens, and what is said of it at every door."""

    name: str
    expected: Ended


SITUATIONS = (
    Situation("right", PASS),
    Situation("wrong number", FAIL),
    Situation("ranks disagree", FAIL),
    Situation("refused though claimed", FAIL),
    Situation("not claimed", NOT_CLAIMED),
    Situation("raised on one rank", FAIL),
    Situation("raised on all", FAIL),
    Situation("a rank died early", FAIL),
    Situation("died after its last report", FAIL),
    Situation("hung once, passes alone", UNKNOWN),
    Situation("hung always", FAIL),
    Situation("leaked", FAIL),
    Situation("undecidable", UNKNOWN),
    Situation("known failure", EXPECTED),
    Situation("known failure beside a new one", FAIL),
    Situation("nothing was asked", UNKNOWN),
)
OF_FAULT = {
    "right": "RIGHT",
    "wrong number": "WRONG",
    "ranks disagree": "DISAGREES",
    "refused though claimed": "REFUSES",
    "raised on one rank": "ONE_RAISES",
    "raised on all": "ALL_RAISE",
    "a rank died early": "DIES",
    "died after its last report": "DIES_LATE",
    "hung once, passes alone": "HANGS_ONCE",
    "hung always": "HANGS",
    "leaked": "LEAKS",
    "undecidable": "UNDECIDED",
}
"""Situation -> the implementation of `contract_faults` in which it happens."""

Cell = Callable[[Given], Ended]


class Door(NamedTuple):
    """One way in.

    Attributes:
        name: Of the command or function.
        cells: How a situation is met there, by situation.
        otherwise: What is expected there instead of what stands beside the situation, with the reason.
        without: Why a situation cannot be expressed there.
    """

    name: str
    cells: Mapping[str, Cell]
    otherwise: Mapping[str, tuple[Ended, str]]
    without: Mapping[str, str]


def _with(door: Callable[[Given, str], Ended]) -> dict[str, Cell]:
    return {situation: _once_there(lambda given, name=name: door(given, name)) for situation, name in OF_FAULT.items()}


def _once_there(cell: Cell) -> Cell:
    """Return the cell with the file there that makes a rank hang once."""

    def opened(given: Given) -> Ended:
        once = given.folder / "once"
        once.touch()
        given.monkeypatch.setenv(faults.ONCE, str(once))
        return cell(given)

    return opened


WRONG_STEP = {"kind": "diverged", "quantity": "gradient", "operation": "step"}
CHECKS = ("training.learning_rate_changes", "training.uneven_batches")
_NO_LIST = "no list of known failures is taken here: what fails is said, and a known failure is named at most"

RUN = Door(
    "run",
    {
        **_with(doors.run),
        "not claimed": lambda given: doors.run(given, "CLAIMS_NOTHING", "clipping.norm_1"),
        "known failure": lambda given: doors.run_expecting(given, "WRONG", CHECKS[:1], WRONG_STEP),
        "known failure beside a new one": lambda given: doors.run_expecting(given, "WRONG", CHECKS, WRONG_STEP),
        "nothing was asked": lambda given: doors.run(given, "CLAIMS_NOTHING", "clipping.*"),
    },
    {"nothing was asked": (NOT_CLAIMED, "what is not claimed is all that was asked, and is named; the exit code is 3")},
    {},
)
FUZZ = Door(
    "fuzz",
    {
        **_with(doors.fuzz),
        "known failure": lambda given: doors.fuzz(given, "WRONG", [["diverged"]]),
        "known failure beside a new one": lambda given: doors.fuzz(given, "KNOWN_AND_NEW", [["diverged"]]),
        "nothing was asked": lambda given: doors.fuzz(given, "RIGHT", more=("--seconds", "0.000001")),
    },
    {},
    {"not claimed": "nothing is drawn that is not claimed; what is left out is printed at the start"},
)
CERTIFY = Door(
    "certify",
    {**_with(doors.certificate), "nothing was asked": lambda given: doors.certificate(given, "CLAIMS_LESS")},
    {"nothing was asked": (Ended("nothing", 3), "no cell ran, so that there is no verdict; the exit code is 3")},
    {
        "not claimed": "such cells are counted by what they need, and are not asked",
        "known failure": _NO_LIST,
        "known failure beside a new one": _NO_LIST,
    },
)
CHECKPOINTS = Door(
    "checkpoints",
    {**_with(doors.checkpoints), "nothing was asked": lambda given: doors.checkpoints(given, "CLAIMS_NOTHING")},
    {
        "nothing was asked": (
            Ended("refused", 2),
            "an implementation that claims nothing of it is bad usage, told at once",
        )
    },
    {
        "not claimed": "what is not claimed is no row and no column",
        "known failure": _NO_LIST,
        "known failure beside a new one": _NO_LIST,
    },
)
REPLAY = Door(
    "replay",
    {**_with(doors.replay), "not claimed": lambda given: doors.replay(given, "CLAIMS_LESS")},
    {
        "not claimed": (
            Ended("refused", 2),
            "a case that asks for what is not claimed is bad usage; it is named and not judged",
        )
    },
    {
        "known failure": _NO_LIST,
        "known failure beside a new one": _NO_LIST,
        "nothing was asked": "a file without a case is bad usage (tests/fsdp_testing/cli/test_fuzz.py)",
    },
)
_SCRIPT = (
    "right", "wrong number", "ranks disagree", "raised on one rank", "raised on all", "a rank died early",
    "died after its last report", "hung once, passes alone", "hung always", "undecidable", "nothing was asked",
)  # fmt: skip
_NO_CLAIMS = "a script, a loop or an item claims nothing, so that nothing is refused or left out"
_ONCE = "pytest runs an item once: a hang fails, also where it would pass alone (pytest-rerunfailures asks for more)"
TRAIN = Door(
    "train",
    {name: _once_there(lambda given, name=name: doors.train(given, name)) for name in _SCRIPT},
    {},
    {
        "refused though claimed": _NO_CLAIMS,
        "not claimed": _NO_CLAIMS,
        "leaked": "a script's processes end with it",
        "known failure": _NO_LIST,
        "known failure beside a new one": _NO_LIST,
    },
)
_OF_LOOP = {
    "right": faults.train,
    "wrong number": faults.train_wrong,
    "ranks disagree": faults.train_disagreeing,
    "raised on one rank": faults.train_raising_on_one,
    "raised on all": faults.train_raising,
    "a rank died early": faults.train_dying,
    "died after its last report": faults.train_dying_late,
    "hung once, passes alone": faults.train_hanging_once,
    "hung always": faults.train_hanging,
    "undecidable": faults.train_chaotically,
    "nothing was asked": faults.train_nothing,
}
CHECK_TRAINING = Door(
    "check_training",
    {name: _once_there(lambda given, loop=loop: doors.training(given, loop)) for name, loop in _OF_LOOP.items()},
    {},
    {
        "refused though claimed": _NO_CLAIMS,
        "not claimed": _NO_CLAIMS,
        "leaked": "what a loop leaves in its rank is told with the test, and the world is replaced",
        "known failure": "pytest's own xfail, as for any test: the column of a pytest item",
        "known failure beside a new one": "likewise",
    },
)
_OF_MODEL = (
    "wrong number", "ranks disagree", "refused though claimed", "raised on one rank", "raised on all", "a rank died early",
    "hung always",
)  # fmt: skip
MODEL = Door(
    "check_model",
    {
        **{
            name: (lambda given, name=name: doors.model(given, doors.SOUND_MODEL, f"MODEL_{OF_FAULT[name]}"))
            for name in _OF_MODEL
        },
        "hung once, passes alone": _once_there(lambda given: doors.model(given, doors.SOUND_MODEL, "MODEL_HANGS_ONCE")),
        "right": lambda given: doors.model(given, doors.SOUND_MODEL, "RIGHT"),
        "undecidable": lambda given: doors.model(given, doors.NOISY_MODEL, "RIGHT"),
        "nothing was asked": lambda given: doors.model(given, doors.FLAT_MODEL, "RIGHT"),
    },
    {},
    {
        "not claimed": "every model is asked; an implementation that cannot train it fails",
        "died after its last report": "the report is what the training returns: nothing of it comes after",
        "leaked": "one model is trained in one job; nothing watches whether it stays",
        "known failure": "`expected_failures` of `parametrize_with_models` is a strict xfail: the column of a pytest item",
        "known failure beside a new one": "likewise",
    },
)
_OF_PARTS = "a part of a run has verdicts, whatever they came from: fail"
MERGE = Door(
    "merge",
    {
        "right": lambda given: doors.merge(given, Verdict.PASS, Verdict.PASS),
        "wrong number": lambda given: doors.merge(given, Verdict.PASS, Verdict.FAIL),
        "not claimed": lambda given: doors.merge(given, Verdict.NOT_CLAIMED, Verdict.NOT_CLAIMED),
        "undecidable": lambda given: doors.merge(given, Verdict.PASS, Verdict.UNKNOWN),
        "known failure": lambda given: doors.merge(given, Verdict.PASS, Verdict.EXPECTED_FAILURE),
        "known failure beside a new one": lambda given: doors.merge(given, Verdict.EXPECTED_FAILURE, Verdict.FAIL),
        "nothing was asked": lambda given: doors.merge(given, Verdict.PASS, Verdict.PASS, lost=1),
    },
    {"nothing was asked": (Ended("refused", 2), "a part that is missing is bad usage, told by its number")},
    {situation.name: _OF_PARTS for situation in SITUATIONS[2:12] if situation.name != "not claimed"},
)
_ITEMS = {
    "right": "test_right",
    "wrong number": "test_wrong_number",
    "ranks disagree": "test_ranks_disagree",
    "refused though claimed": "test_refused",
    "not claimed": "test_not_claimed",
    "raised on one rank": "test_raised_on_one_rank",
    "raised on all": "test_raised_on_all_ranks",
    "a rank died early": "test_died_early",
    "died after its last report": "test_died_late",
    "hung once, passes alone": "test_hung_once",
    "hung always": "test_hung",
    "known failure": "test_known",
    "known failure beside a new one": "test_known_beside_a_new_one",
}
_GOOD_ITEMS = ("test_right", "test_known", "test_not_claimed")
_RUNS: dict[bool, dict[str, Ended]] = {}


def _item(name: str) -> Cell:
    """All good items are one run of pytest, and all bad ones another: the exit code is the run's."""

    def opened(_given: Given) -> Ended:
        good = name in _GOOD_ITEMS
        if good not in _RUNS:
            known = "test_known and not beside"
            chosen = f"test_right or test_not_claimed or ({known})"
            with tempfile.TemporaryDirectory(prefix="fsdp-contract-") as folder:
                _RUNS[good] = doors.items(Path(folder), chosen if good else f"not ({chosen})")
        return _RUNS[good][name]

    return opened


def _no_item(given: Given) -> Ended:
    return doors.items(given.folder, "nothing_of_that_name")[""]


ITEM = Door(
    "a pytest item",
    {**{situation: _item(name) for situation, name in _ITEMS.items()}, "nothing was asked": _no_item},
    {
        "not claimed": (Ended("not claimed", 0), "a skip is the user's own word, and pytest counts it apart"),
        "hung once, passes alone": (FAIL, _ONCE),
        "nothing was asked": (Ended("nothing", 5), "pytest's own exit code for a run that collects no test"),
    },
    {
        "leaked": "what an item leaves is restored or makes its world be replaced, and is named as a warning",
        "undecidable": "an item asserts something or does not: pytest knows no third word",
    },
)
DOORS = (RUN, FUZZ, CERTIFY, CHECKPOINTS, REPLAY, TRAIN, CHECK_TRAINING, MODEL, MERGE, ITEM)


def due(door: Door, situation: Situation) -> Ended:
    """Return what a door must say; a function has no exit code."""
    expected = door.otherwise.get(situation.name, (situation.expected, ""))[0]
    return expected._replace(code=None) if door.name.startswith("check_") else expected


def shown(table: Mapping[tuple[str, str], Ended]) -> str:
    """Return the table as text: what each door said, what was expected where that is other, and the reasons below."""

    def text(ended: Ended) -> str:
        return ended.word if ended.code is None else f"{ended.word} {ended.code}"

    lines = [f"| situation | {' | '.join(door.name for door in DOORS)} |", f"|{'---|' * (len(DOORS) + 1)}"]
    notes: list[str] = []
    for situation in SITUATIONS:
        row = [f"{situation.name} ({text(situation.expected)})"]
        for door in DOORS:
            why = door.without.get(situation.name) or door.otherwise.get(situation.name, (None, ""))[1]
            if why and why not in notes:
                notes.append(why)
            mark = f" [{notes.index(why) + 1}]" if why else ""
            if situation.name in door.cells:
                got, wanted = table[situation.name, door.name], due(door, situation)
                row.append(text(got) + (f" (EXPECTED {text(wanted)})" if got != wanted else "") + mark)
            else:
                row.append(f"-{mark}")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, "", *(f"{number}. {why}" for number, why in enumerate(notes, 1)), ""])


def main() -> None:
    """Run every cell, and print the table."""
    found: dict[tuple[str, str], Ended] = {}
    for door in DOORS:
        for situation in SITUATIONS:
            if situation.name in door.cells:
                with (
                    tempfile.TemporaryDirectory(prefix="fsdp-contract-") as folder,
                    pytest.MonkeyPatch.context() as patch,
                ):
                    patch.chdir(folder)
                    found[situation.name, door.name] = door.cells[situation.name](Given(Path(folder), patch))
    print(shown(found))


if __name__ == "__main__":
    main()
