"""Every door of the project, opened by its public entry: its words and exit code in a situation."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

import contract_faults
import forked
import pytest

from fsdp_testing import check_training
from fsdp_testing.cases.records import (
    Batch,
    Case,
    CaseOutcome,
    CheckResult,
    ForwardBackward,
    ModelSpec,
    Request,
    RunReport,
    Step,
    Verdict,
    WorldSpec,
)
from fsdp_testing.cli import fuzz as fuzz_command
from fsdp_testing.cli.main import main
from fsdp_testing.errors import HarnessError, WorldFailed
from fsdp_testing.ranks import pool
from fsdp_testing.search.certificate import certify
from fsdp_testing.search.certificate.axes import EVERY_RANK, Cell
from fsdp_testing.search.state import read_state
from fsdp_testing.train.function import TrainingDiffers, TrainingUndecided
from fsdp_testing.train.model import ModelDiffers, ModelUndecided, check_model

HERE = Path(__file__).parent
CELL = Cell("no_shard", "2", "root", "plain", "S", "S", EVERY_RANK, "to none", "float64")
HANGS_AFTER = 5.0
PATIENT = 120.0
WORDS = {"not_claimed": "not claimed", "expected_failure": "expected"}
WORST_FIRST = ("fail", "unknown", "expected", "not claimed", "pass")


class Ended(NamedTuple):
    """What a door said, in the words of the contract, and its exit code; None where it is a function."""

    word: str
    code: int | None


class Given(NamedTuple):
    """Where a door may write, and what pytest lends it."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch


def _worst(said: Iterable[str]) -> str:
    """Return the gravest of what was said, in the words of the contract."""
    words = {WORDS.get(one, one) for one in said}
    return next((word for word in WORST_FIRST if word in words), "nothing")


def _timeout(name: str) -> str:
    return str(HANGS_AFTER if "HANGS" in name else PATIENT)


def run(given: Given, name: str, check: str = "training.learning_rate_changes", more: Sequence[str] = ()) -> Ended:
    """`fsdp-verify run`."""
    report = given.folder / "run.json"
    asked = ["run", f"contract_faults:{name}", "--check", check, "--explain", "0", "--timeout", _timeout(name)]
    code = main([*asked, "--json", str(report), *more])
    results = RunReport.from_json(report.read_text(encoding="utf-8")).results
    return Ended(_worst(result.verdict.value for result in results), code)


def run_expecting(given: Given, name: str, checks: Sequence[str], expected: Mapping[str, str]) -> Ended:
    """`fsdp-verify run --expected-failures`, with one entry for the first check."""
    entry = ", ".join(f"{key} = {json.dumps(text)}" for key, text in expected.items())
    file = given.folder / "expected.toml"
    file.write_text(
        f'["contract_faults:{name}"]\n"{checks[0]}" = {{ reason = "planted", {entry} }}\n', encoding="utf-8"
    )
    more = [word for check in checks[1:] for word in ("--check", check)]
    return run(given, name, checks[0], [*more, "--expected-failures", str(file)])


def fuzz(given: Given, name: str, known: Sequence[Sequence[str]] = (), more: Sequence[str] = ()) -> Ended:
    """`fsdp-verify fuzz`; the time for shrinking is cut, which changes no verdict."""
    plan = fuzz_command._plan
    given.monkeypatch.setattr(fuzz_command, "_plan", lambda *args: replace(plan(*args), shrink_seconds=0.1))
    state = given.folder / "campaign"
    asked = [
        "fuzz",
        f"contract_faults:{name}",
        "--state",
        str(state),
        "--jobs",
        "1",
        "--no-scripts",
        "--max-operations",
        "3",
    ]
    if known:
        rule = {"name": "planted", "reason": "planted", "signatures": known}
        document = {"format": "fsdp_testing/known_failures", "version": 2, "rules": [rule]}
        (given.folder / "known.json").write_text(json.dumps(document), encoding="utf-8")
        asked += ["--known", str(given.folder / "known.json")]
    drawn, timeout = ("--examples", "24", "--seed", "4"), _timeout(name)
    if name == "HANGS":  # each case takes its time limit some ten times: alone, again, and while it is shrunk
        drawn, timeout = ("--examples", "1", "--seed", "1"), "2"
    code = main([*asked, "--timeout", timeout, *(more or drawn)])
    verdicts = read_state(state / "state.json").counts()
    right = "expected" if verdicts[Verdict.EXPECTED_FAILURE] else "pass"
    return Ended({0: right, 1: "fail", 3: "unknown"}.get(code, "nothing"), code)


def certificate(given: Given, name: str) -> Ended:
    """`fsdp-verify certify`, over one cell of two ranks."""
    given.monkeypatch.setattr(certify, "jobs", lambda claimed, *_: [(CELL,)] if claimed(CELL) else [])
    file, state = given.folder / "certificate.json", given.folder / "state"
    asked = ["certify", f"contract_faults:{name}", "--state", str(state), "--jobs", "1", "--explain", "0"]
    code = main([*asked, "--timeout", _timeout(name), "--json", str(file)])
    counts = json.loads(file.read_text(encoding="utf-8"))["verdicts"]
    return Ended(_worst(verdict for verdict, count in counts.items() if count), code)


def checkpoints(given: Given, name: str) -> Ended:
    """`fsdp-verify checkpoints`, one state saved and loaded in memory."""
    file = given.folder / "checkpoints.json"
    asked = ["checkpoints", f"contract_faults:{name}", "--world-size", "2", "--subject", "momentum, shared weight"]
    code = main([*asked, "--way", "memory", "--timeout", _timeout(name), "--json", str(file)])
    if not file.exists():
        return Ended("refused", code)
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    return Ended(_worst(result["verdict"] for result in results), code)


class KeptPool:
    """New ranks from the fork server that is there: `replay` starts a new one for each run, which takes seconds."""

    def __init__(self) -> None:
        self._pool = pool.default_pool()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def close(self) -> None:
        for world in self._pool.worlds():
            world.discard()


def replay(given: Given, name: str) -> Ended:
    """`fsdp-verify replay` of a recorded case; the one that is right on new fork servers, as users have them."""
    tree = {"width": 3, "nodes": [{"kind": "linear", "name": "a", "out": 3}]}
    program = (ForwardBackward(Batch(1)), Step(), ForwardBackward(Batch(2)), Step())
    case = Case(ModelSpec("tree", dtype="float64", tree=tree), WorldSpec(2), program, strategy="no_shard")
    file = given.folder / "case.json"
    file.write_text(case.to_json(), encoding="utf-8")
    if name != "RIGHT":
        given.monkeypatch.setattr(pool, "Pool", KeptPool)
    return _by_code(
        main(["replay", str(file), "--implementation", f"contract_faults:{name}", "--timeout", _timeout(name)])
    )


def train(_given: Given, situation: str) -> Ended:
    """`fsdp-verify train`, two steps on two ranks."""
    limit = str(2 * HANGS_AFTER if situation.startswith("hung") else PATIENT)
    # A script that has made the steps that are compared is ended: to come to its own end it needs to make fewer.
    steps = "10" if situation == "died after its last report" else "2"
    asked = ["train", "--world-sizes", "2", "--steps", steps, "--timeout", limit]
    return _by_code(main([*asked, str(HERE / "contract_script.py"), situation]))


def merge(given: Given, *verdicts: Verdict, lost: int = 0) -> Ended:
    """`fsdp-verify merge` of the parts of a run, one check each, of which the last `lost` are not given."""
    files = []
    parts = range(1, len(verdicts) + 1)
    for part, verdict in zip(parts, verdicts, strict=True):
        cases = (CaseOutcome("a case", verdict, 2, "no_shard"),)
        result = CheckResult("torch-ddp", CHECKS_OF_PARTS[part - 1], "", (), verdict, cases=cases)
        of, request = len(verdicts), Request(CHECKS_OF_PARTS)
        report = RunReport((result,), ("torch-ddp",), {}, (2,), shard=(part, of), request=request)
        files.append(given.folder / f"{part}.json")
        files[-1].write_text(report.to_json(), encoding="utf-8")
    merged = given.folder / "merged.json"
    code = main(["merge", *map(str, files[: len(files) - lost]), "--json", str(merged)])
    if not merged.exists():
        return Ended("refused", code)
    results = RunReport.from_json(merged.read_text(encoding="utf-8")).results
    return Ended(_worst(result.verdict.value for result in results), code)


CHECKS_OF_PARTS = ("construction.keeps_numbers", "construction.keeps_buffers")


def _by_code(code: int) -> Ended:
    return Ended({0: "pass", 1: "fail", 3: "unknown"}.get(code, "refused"), code)


def training(_given: Given, loop: Callable[[Any], Any]) -> Ended:
    """`check_training`, on one rank and on two: a function, so that a test which calls it passes or fails."""
    timeout = HANGS_AFTER if "hanging" in str(loop.__name__) else PATIENT
    try:
        check_training(loop, world_sizes=(1, 2), timeout=timeout)
    except (TrainingDiffers, WorldFailed):
        return Ended("fail", None)
    except (TrainingUndecided, HarnessError):
        return Ended("unknown", None)
    return Ended("pass", None)


def model(_given: Given, make: Callable[[], Any], name: str) -> Ended:
    """`check_model` of a model under an implementation: a function likewise."""
    try:
        check_model(make, f"contract_faults:{name}", timeout=HANGS_AFTER if "HANGS" in name else PATIENT)
    except ModelDiffers:
        return Ended("fail", None)
    except ModelUndecided:
        return Ended("unknown", None)
    return Ended("pass", None)


ITEMS = """
import os, signal, threading
import pytest, torch
import torch.distributed as dist

pytestmark = pytest.mark.world(2, timeout=8)


def test_right(world):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2


def test_wrong_number(world):
    assert torch.ones(1) == 2


def test_ranks_disagree(world):
    if world.rank == 1:
        dist.all_reduce(torch.ones(2))
    else:
        dist.all_reduce(torch.ones(1))


def test_raised_on_one_rank(world):
    if world.rank == 1:
        raise ValueError("rank 1 cannot go on")


def test_raised_on_all_ranks(world):
    raise ValueError("nobody can go on")


def test_refused(world):
    raise NotImplementedError("not there yet")


def test_died_early(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.fixture
def deadly(world):
    yield
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_died_late(deadly):
    pass


def test_hung_once(world, request):
    hung = request.path.with_name("hung")
    if world.rank == 1 and not hung.exists():
        hung.touch()
        threading.Event().wait()
    dist.barrier()


def test_hung(world):
    if world.rank == 1:
        threading.Event().wait()
    dist.barrier()


@pytest.mark.xfail(raises=ValueError, strict=True)
def test_known(world):
    raise ValueError("known")


@pytest.mark.xfail(raises=ValueError, strict=True)
def test_known_beside_a_new_one(world):
    if world.rank == 1:
        raise KeyError("new")
    raise ValueError("known")


@pytest.mark.skip(reason="not claimed")
def test_not_claimed(world):
    raise ValueError
"""
_OF_PYTEST = {"failure": "fail", "error": "fail", "skipped": "skipped"}


def items(folder: Path, chosen: str) -> dict[str, Ended]:
    """pytest with this project's plugin, in a process of its own: what is said of each item, and the run's exit code."""
    (folder / "test_items.py").write_text(ITEMS, encoding="utf-8")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, "--junit-xml", "items.xml"]
    done = forked.shared().run(folder, command, os.environ, timeout=300)
    found = {}
    for one in ET.parse(folder / "items.xml").iter("testcase"):
        kinds = [(part.tag, part.get("type")) for part in one]
        word = next((_OF_PYTEST[tag] for tag, _ in kinds if tag in _OF_PYTEST), "pass")
        word = {"pytest.xfail": "expected", "pytest.skip": "not claimed"}.get(dict(kinds).get("skipped") or "", word)
        found[str(one.get("name")).partition("[")[0]] = Ended(word, done.returncode)
    return found or {"": Ended("nothing", done.returncode)}


SOUND_MODEL, NOISY_MODEL, FLAT_MODEL = (
    contract_faults.TinyModel,
    contract_faults.NoisyModel,
    contract_faults.FlatModel,
)
