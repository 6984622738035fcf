"""A state on disk: whole, of one subject, and a verdict is there or is not, whatever is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_testing.cases.records import Verdict
from fsdp_testing.errors import InvalidArgument, InvalidRecord
from fsdp_testing.search.state import Reason, State, Verdicts, changes, held, read_state, refuse, write_state

STATE = State(
    {"implementation": "toy", "source": "digest"},
    (1, 2),
    "pfue.-",
    {"1": Reason("is off by 1", ("diverged", "gradient", "step"), confirmed=True), "2": Reason("the judge was lost")},
    variants={"pass": 2, "unknown": 1},
    known={"rule": 1},
    suspects=(1,),
    suspect_variants=1,
    turns={"rule": 3},
    runs=4,
    seconds=1.5,
)


def test_a_state_comes_back(tmp_path: Path):
    write_state(tmp_path / "state.json", STATE)
    assert read_state(tmp_path / "state.json") == STATE
    assert STATE.unfinished == (4,)
    assert STATE.counts() == {
        Verdict.PASS: 3,
        Verdict.FAIL: 1,
        Verdict.UNKNOWN: 2,
        Verdict.EXPECTED_FAILURE: 1,
    }
    assert str(STATE.reasons["1"].signature) == "diverged gradient in step"


def test_a_case_has_the_verdict_that_was_taken_in_last_and_its_reason():
    verdicts = Verdicts("p.")
    assert (verdicts.add_case(), verdicts.numbers(None), verdicts[1]) == (2, [1, 2], None)
    verdicts.take(2, Verdict.UNKNOWN, Reason("lost"))
    assert (verdicts.letters, verdicts.reasons) == ("p.u", {2: Reason("lost")})
    verdicts.take(2, Verdict.PASS)
    assert (verdicts.letters, verdicts.reasons, verdicts[2]) == ("p.p", {}, Verdict.PASS)
    with pytest.raises(IndexError):
        verdicts.take(3, Verdict.PASS)
    with pytest.raises(KeyError):
        verdicts.take(1, Verdict.NOT_CLAIMED)  # what is not claimed is no case


def test_an_interrupted_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "state.json"
    write_state(file, STATE)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_state(file, State({}))
    assert read_state(file) == STATE


def test_a_state_that_cannot_be_written_is_a_bad_argument(tmp_path: Path):
    (tmp_path / "state").write_text("a file")
    with pytest.raises(InvalidArgument, match="--state: expected a writable path"):
        write_state(tmp_path / "state" / "state.json", STATE)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"verdicts": "pass"}, r"verdicts: expected letters of pfue, got \['a', 's'\]"),
        ({"verdicts": 5}, "verdicts: expected str"),
        ({"variants": {"not_claimed": 1}}, "variants: expected verdicts"),
        ({"variants": {"pass": "many"}}, r"variants\.pass"),
        ({"reasons": {"1": "why"}}, "reasons"),
        (
            {"reasons": {"1": {"text": "why", "looks": ["nonsense"]}}},
            "reasons.1.looks: expected what a failure looks like",
        ),
        (
            {"reasons": {"1": {"text": "why", "looks": ["died"] * 9}}},
            "reasons.1.looks: expected what a failure looks like",
        ),
        ({"suspects": [6]}, r"suspects: expected numbers of its cases, got \[6\]"),
        ({"version": 9}, "newer fsdp-testing"),
        ({"format": "fsdp_testing/fuzz_state", "version": 3}, "a state of an earlier version, which has none"),
        ({"format": "fsdp_testing/certificate_state", "version": 2}, "a state of an earlier version, which has none"),
        ({"format": "fsdp_testing/report"}, "expected format"),
    ],
)
def test_a_damaged_state_is_refused(damage: dict[str, object], message: str, tmp_path: Path):
    file = tmp_path / "state.json"
    write_state(file, STATE)
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    with pytest.raises(InvalidRecord, match=message) as refused:
        read_state(file)
    assert "state.json" in str(refused.value)


def test_what_is_of_something_else_is_refused_with_all_that_differs(tmp_path: Path):
    assert not changes(STATE.subject, STATE, (1, 2))
    wrong = changes({"implementation": "other", "source": "new", "cases by": "seed 1"}, STATE, (2, 2))
    with pytest.raises(InvalidRecord) as refused:
        refuse(tmp_path / "state.json", wrong)
    for text in (
        "implementation: expected 'other', got 'toy'",
        "the implementation or fsdp-testing has changed since",
        "cases by: expected 'seed 1', got 'nothing'",
        "part: expected 2 of 2, got 1 of 2",
        "Give another --state directory, or remove that one to start over",
    ):
        assert text in str(refused.value)
    refuse(tmp_path / "state.json", {})


def test_a_directory_is_one_processes_at_a_time(tmp_path: Path) -> None:
    """The last of two to write won, and the verdicts of the other were gone."""
    script = (
        "import sys; from pathlib import Path; from fsdp_testing.search.state import held\n"
        "try:\n    with held(Path(sys.argv[1])): print('held')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )

    def other() -> str:
        ended = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
        )
        return ended.stdout.strip()

    with held(tmp_path / "."):
        assert other().startswith("InvalidArgument --state")
    assert other() == "held"


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.touch()
    with (
        pytest.raises(InvalidArgument, match="expected a directory that can be made and written, got .*File exists"),
        held(file),
    ):
        pass
