"""Hostile files for every door that reads one: damaged, of wrong types, huge, deep, in wrong encodings; all in one process.

The n-th input follows from the seed and n alone. A door is a command with one of its files replaced; it reads that as it
does for users, and ends where the first rank would start (`ReadAsSound`). It must end within `LIMIT_S`, by its documented
exit code and, where it refuses, in one sentence; nothing that stands in a file may run (`MARK` would be there).
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soak_faults import raised

from fsdp_testing.base.printable import printable
from fsdp_testing.cli.main import main

LIMIT_S = 10.0
NAME = "fsdp_ref-composable"
MOST_CHARACTERS = 3100


class ReadAsSound(BaseException):
    """A door took the file, and would start ranks now."""


class TookTooLong(BaseException):
    """A door did not end in time."""


@dataclass(frozen=True)
class Door:
    """A command, the file of it that is replaced, and a sound content of that file; of a pickle that is given as JSON."""

    name: str
    command: Callable[[Path], list[str]]
    file: str
    sound: str
    beside: dict[str, str]

    @property
    def form(self) -> str:
        return {".toml": "toml", ".json": "json"}.get(Path(self.file).suffix, "pickle")


# ------------------------------------------------------------------------------------------------ doors

DEFECTS = """format = "fsdp_testing/known_defects"
version = 1
[[defect]]
name = "one"
reason = "it is so"
page = "none"
affects = "torch"
[[defect.expected]]
on = ["fsdp_ref-composable", "torch-fsdp2.tensor_parallel"]
checks = ["clipping.norm_inf"]
signatures = [["diverged", "total_norm", "clip"]]
[[defect.rules]]
name = "one-rule"
reason = "so"
on = ["fsdp_ref-composable"]
signatures = [["diverged", "gradient", "clip", "*without*"]]
operations = ["forward_backward", "clip"]
tags = ["strategy:full_shard"]
"""
ENTRIES = """[fsdp_ref-composable]
"clipping.norm_inf" = [
  { reason = "empty shards", kind = "one_raised", quantity = "RuntimeError: norm", operation = "clip", page = "a.md" },
  { reason = "padding is counted", kind = "diverged", quantity = "total_norm", operation = "clip", parameter = "a*" },
]
"training.sgd_momentum" = { reason = "so", kind = "hung" }
[fsdp_ref-composable.tensor_parallel]
"training.sgd_momentum" = { reason = "so", kind = "hung" }
"""


TREE = {
    "width": 3,
    "nodes": [
        {"kind": "linear", "name": "a", "out": 2},
        {"kind": "group", "name": "b", "nodes": [{"kind": "norm", "name": "c"}]},
    ],
}


def documents() -> dict[str, str]:
    """Return a sound document of each kind that has a reader."""
    from fsdp_testing.cases.operations import Batch, Clip, ForwardBackward
    from fsdp_testing.cases.records import (
        Case,
        CaseOutcome,
        CheckResult,
        FailureKind,
        Finding,
        ModelSpec,
        Request,
        RunReport,
        Step,
        Verdict,
        WorldSpec,
    )  # fmt: skip
    from fsdp_testing.checks.findings.discovery import Discovery
    from fsdp_testing.judging.known import KnownFailures
    from fsdp_testing.judging.signature import Signature

    case = Case(ModelSpec("tree", tree=TREE), WorldSpec(2), (ForwardBackward(Batch(1)), Clip(1.0), Step()), seed=1)
    finding = Finding(
        FailureKind.DIVERGED, "gradient of a", 1, "clip", (0, 1), "it differs", case, max_error=1.0, bound=1e-9
    )
    outcome = CaseOutcome("a", Verdict.FAIL, 2, "full_shard")
    result = CheckResult(
        NAME, "clipping.norm_2", "norms", ("clip",), Verdict.FAIL, "it differs", (finding,), (outcome,)
    )
    report = RunReport(
        (result,),
        (NAME,),
        {"torch": "2"},
        (2,),
        shard=(1, 2),
        request=Request(("clipping.norm_2", "training.sgd_momentum")),
    )
    discovery = Discovery(
        NAME, Signature(FailureKind.DIVERGED, "parameter", "step"), case, case, "it differs", cause="one more step"
    )
    return {
        "case": case.to_json(),
        "finding": discovery.to_json(),
        "report": report.to_json(),
        "rules": KnownFailures((discovery.rule(),)).to_json(),
        "second report": RunReport((), (NAME,), {"torch": "2"}, (2,), shard=(2, 2), request=report.request).to_json(),
    }


def certificate(part: int, case: str) -> str:
    """Return one of two parts of a certificate with every verdict, and a cause that is known by a case."""
    from fsdp_testing.cases.records import Case
    from fsdp_testing.search.certificate.axes import blocks
    from fsdp_testing.search.certificate.causes import CellCause
    from fsdp_testing.search.certificate.summary import Summary

    cell = next(iter(next(iter(blocks())).cells()))
    cause = CellCause(
        cell,
        1,
        "diverged gradient",
        "it differs",
        Case.from_json(case, "case"),
        known="one-rule",
        link="https://example.org",
    )
    verdicts = {"pass": 2, "fail": 1, "unknown": 1}
    return Summary(
        *(NAME, {"torch": "2"}, "digest", 12, {"hybrid": 4}, 4, 0, verdicts),
        faces={"full_shard 2": {"all": verdicts, "units: root": verdicts}},
        reasons={"a rank died": 1},
        causes=(cause,),
        unconfirmed=0,
        unexplained=1,
        failing=(cell.name,),
        seconds=1.0,
        shard=(part, 2),
    ).to_json()


def dump(rank: int) -> str:
    """Return, as JSON, what the flight recorder writes of a rank that waits in its second collective; rank 1 comes to one."""
    names = ("all_reduce", "_all_gather_base")[: 2 - rank]
    entries = [
        {
            "record_id": number,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number + 1,
            "p2p_seq_id": 0,
            "profiling_name": f"nccl:{name}",
            "time_created_ns": 10**9 * number + rank,
            "input_sizes": [[4]],
            "input_dtypes": ["Float"],
            "output_sizes": [[4 * (number + 1)]],
            "output_dtypes": ["Float"],
            "state": "started" if number else "completed",
            "retired": not number,
            "is_p2p": False,
            "frames": [{"name": "train", "filename": "train.py", "line": 10 + number}],
        }
        for number, name in enumerate(names)
    ]
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return json.dumps({"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": entries})


def fuzz(at: Path) -> list[str]:
    return ["fuzz", NAME, "--examples", "4", "--jobs", "1", "--state", str(at / "state")]


def doors(folder: Path) -> list[Door]:
    """Return every door; sound states are made below `folder` by the commands themselves."""
    made: list[Door] = []
    certify = lambda at: ["certify", NAME, "--sample", "3", "--jobs", "1", "--state", str(at / "state")]
    pairs = lambda at: ["run", NAME, "--pairs", "--world-size", "2", "--jobs", "1", "--state", str(at / "state")]
    sources = (
        ("fuzz", fuzz, "state.json"),
        ("certify", certify, "certificate.json"),
        ("run --pairs", pairs, "state.json"),
    )
    for name, command, file in sources:
        with entered(), contextlib.suppress(ReadAsSound), contextlib.redirect_stdout(io.StringIO()):
            main(command(folder / name))
        made.append(Door(f"{name} --state", command, f"state/{file}", (folder / name / "state" / file).read_text(), {}))
    state = json.loads(made[0].sound)
    state.update(
        verdicts="pf.", reasons={"1": {"text": "it differs", "looks": ["diverged", "a", "step"], "confirmed": True}}
    )
    made[0] = Door(made[0].name, fuzz, made[0].file, json.dumps(state), {})
    return [*made, *_doors_of_documents(state)]


def _doors_of_documents(state: dict[str, Any]) -> list[Door]:
    kinds, made = documents(), []
    parts = [json.dumps({**state, "shard": [part, 2]}) for part in (1, 2)]
    certificates = [certificate(part, kinds["case"]) for part in (1, 2)]
    merged = lambda at: ["merge", str(at / "a.json"), str(at / "b.json"), "--html", str(at / "out")]
    campaigns = lambda at: ["merge", str(at / "a"), str(at / "b"), "--state", str(at / "all")]
    both = {"a/state.json": parts[0], "b/state.json": parts[1]}
    for kind in ("case", "finding", "report"):
        made.append(
            Door(
                f"replay a {kind}",
                lambda at: ["replay", str(at / "x.json"), "--implementation", NAME],
                "x.json",
                kinds[kind],
                {},
            )
        )
    made += [
        Door("merge reports", merged, "a.json", kinds["report"], {"b.json": kinds["second report"]}),
        Door("merge certificates", merged, "a.json", certificates[0], {"b.json": certificates[1]}),
        Door("merge campaigns", campaigns, "a/state.json", parts[0], {"b/state.json": parts[1]}),
        Door("merge findings", campaigns, "a/found/one/finding.json", kinds["finding"], both),
        Door(
            "fuzz's own findings",
            fuzz,
            "state/found/one/finding.json",
            kinds["finding"],
            {"state/state.json": json.dumps(state)},
        ),
        Door("fuzz --known rules", lambda at: [*fuzz(at), "--known", str(at / "k.json")], "k.json", kinds["rules"], {}),
        Door("fuzz --known defects", lambda at: [*fuzz(at), "--known", str(at / "k.toml")], "k.toml", DEFECTS, {}),
    ]
    run = ["run", NAME, "--jobs", "1", "--check", "training.sgd_momentum"]
    for kind, text in (("entries", ENTRIES), ("defects", DEFECTS)):
        expected = lambda at: [*run, "--expected-failures", str(at / "e.toml")]
        made.append(Door(f"run --expected-failures {kind}", expected, "e.toml", text, {}))
    diagnose = lambda at: ["diagnose", str(at), "--html", str(at.parent / "out")]
    changes = lambda at: ["merge", str(at / "a.json"), str(at / "b.json"), "--compare", str(at / "old.json")]
    whole = {"a.json": kinds["report"], "b.json": kinds["second report"]}
    made += [
        Door("diagnose a pickle", diagnose, "nccl_trace_rank_0", dump(0), {"nccl_trace_rank_1": dump(1)}),
        Door("diagnose JSON", diagnose, "rank_0.json", dump(0), {"rank_1.json": dump(1)}),
        Door("run --compare", lambda at: [*run, "--compare", str(at / "old.json")], "old.json", kinds["report"], {}),
        Door("merge --compare", changes, "old.json", kinds["report"], whole),
    ]
    return made


_KEPT: dict[str, Any] = {}


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what the first call returned: which cells there are takes seconds to find, and depends on no file."""

    def kept(*given: Any) -> Any:
        if function.__name__ not in _KEPT:
            _KEPT[function.__name__] = function(*given)
        return _KEPT[function.__name__]

    return kept


@contextlib.contextmanager
def entered() -> Iterator[None]:
    """Have commands end where the first rank would start."""
    from fsdp_testing.checks import conformance
    from fsdp_testing.checks.findings import rerun
    from fsdp_testing.ranks.pool import Pool
    from fsdp_testing.search.campaign.campaign import Campaign
    from fsdp_testing.search.certificate import certify
    from fsdp_testing.search.pairs import covering

    def sound(*_: Any, **__: Any) -> Any:
        raise ReadAsSound

    def saved(source: Any, *_: Any) -> Any:
        source.save()
        raise ReadAsSound

    places = (
        *((rerun, "replay", sound), (conformance, "_examine", sound), (Pool, "start", lambda _: None)),
        *((Campaign, "run", saved), (certify.Certificate, "run", saved)),
        *(
            (certify, "jobs", _once(certify.jobs)),
            (covering, "covering", lambda _: covering.Covering((), (), {}, {}, {})),
        ),
    )
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, stand_in in places:
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for (owner, name, _), old in zip(places, before):
            setattr(owner, name, old)


def refused(door: Door, folder: Path) -> str:
    """Open a door with its sound file; return what is wrong, empty where it takes that: else it may read no file at all."""
    document = json.loads(door.sound) if door.form == "pickle" else None
    return wrong(door, door.sound.encode() if document is None else pickle.dumps(document), folder, sound=True)


def wrong(door: Door, data: bytes, folder: Path, *, sound: bool = False) -> str:
    """Open a door with one hostile file; return what is wrong with how it ended, empty if nothing is."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in {**door.beside, door.file: data}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    out, err = io.StringIO(), io.StringIO()

    def too_long(*_: Any) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, too_long)
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), entered():
            signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
            code = main(door.command(folder))
            signal.setitimer(signal.ITIMER_REAL, 0)
    except ReadAsSound:
        code = 0
    except TookTooLong:
        return f"no end within {LIMIT_S:.0f} s"
    except BaseException as error:  # noqa: BLE001 - whatever comes out is the answer
        return raised(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if (folder / "MARK").exists():
        return "what stood in the file was executed"
    if sound and code == 2:
        return f"refuses a sound file: {err.getvalue()[:160]}"
    return complaint(code, err.getvalue())


def complaint(code: int, said: str) -> str:
    """Return what is wrong with an exit code and its message."""
    if code not in (0, 1, 2, 3):
        return f"exit code {code}"
    if "Traceback" in said:
        return f"a traceback: {said[-160:]}"
    if code != 2:
        return ""
    lines = said.strip().splitlines()
    if len(lines) != 1 or not lines[0].startswith("fsdp-verify"):
        return f"exit code 2 and {len(lines)} lines: {said[:160]!r}"
    if len(said) > MOST_CHARACTERS:
        return f"a message of {len(said)} characters: {said[:160]!r}"
    if said.rstrip("\n") != printable(said.rstrip("\n")):
        return "control characters in the message"
    return "" if "expected" in said else f"no word of what was expected: {said[:160]!r}"
