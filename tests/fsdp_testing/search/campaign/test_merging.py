"""The parts of a campaign draw disjoint cases, together all of it, and become one campaign again, or are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fuzz_cases import case, micro

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import Scope
from fsdp_testing.cases.records import FailureKind
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.cli.main import main
from fsdp_testing.errors import InvalidArgument, InvalidRecord
from fsdp_testing.judging.known import KnownFailures
from fsdp_testing.judging.signature import Signature
from fsdp_testing.ranks.pool import Pool
from fsdp_testing.search.campaign.campaign import Campaign, Plan
from fsdp_testing.search.campaign.merging import MergedCampaign, joined_progress, merge_campaigns
from fsdp_testing.search.campaign.state import Progress, StateDirectory


def drawn(shard: tuple[int, int], examples: int, folder: Path) -> list[str]:
    """Identities of the cases that a part draws; nothing is run."""
    plan = Plan(registry.adapter_of("torch-ddp"), Scope(), folder, None, examples, seed=3, shard=shard)
    queue = Campaign(plan, Pool(), lambda _: None, lambda *_: None)._queue
    batches = iter(lambda: queue.next_batch(KnownFailures()), [])
    return [asked.case.identity for batch in batches for asked in batch]


def part(path: Path, number: int, of: int = 2, **more: object) -> Progress:
    progress = Progress(
        "torch-ddp",
        campaigns=number,
        drawn=3 + number,
        run=2 + number,
        seconds=1.5,
        statuses={"passed": number, "suspect": 1},  # as earlier versions wrote them
        unfinished=(number,),
        shard=(number, of),
        drawn_by="seed 3",
    )
    progress = replace(progress, **more)  # type: ignore[arg-type]
    StateDirectory(path, progress.implementation).save(progress)
    return progress


def discovery(operation: str) -> Discovery:
    found = case(micro(1))
    return Discovery("torch-ddp", Signature(FailureKind.DIVERGED, "loss", operation), found, found, "differs")


def write(found: Discovery, path: Path) -> None:
    StateDirectory(path, "torch-ddp").write_files(f"found/{found.name}", [("finding.json", found.to_json())])


def test_parts_are_disjoint_and_together_the_whole(tmp_path: Path) -> None:
    whole = drawn((1, 1), 20, tmp_path / "whole")
    parts = [drawn((number, 3), 20, tmp_path / str(number)) for number in (1, 2, 3)]
    assert [len(one) for one in parts] == [7, 7, 6]
    assert sorted(identity for one in parts for identity in one) == sorted(whole)


def test_parts_become_one_campaign_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / name for name in "ab"]
    for number, folder in enumerate(folders, 1):
        part(folder, number)
    for folder in folders:
        write(discovery("step"), folder)
    write(discovery("clip"), folders[1])
    StateDirectory(folders[1], "").write_files("unjudged", [("x.txt", "why")])

    merged = merge_campaigns(reversed(folders), tmp_path / "all")
    # Part 1 drew 0, 2, 4, 6 and part 2 drew 1, 3, 5, 7, 9; of which 2 and 5 did not run, and 8 is missing.
    assert merged.progress.drawn == 10
    assert merged.progress.unfinished == (2, 5, 8)
    assert merged.progress.statuses == {"pass": 3, "fail": 2}
    assert (merged.progress.run, merged.progress.campaigns, merged.repeated) == (7, 2, 1)
    assert sorted(found.signature.operation for found in merged.found) == ["clip", "step"]
    target = StateDirectory(tmp_path / "all", "torch-ddp")
    assert target.load() == merged.progress
    assert len(target.found()) == 2
    assert (tmp_path / "all" / "unjudged" / "x.txt").read_text() == "why"

    again = ["merge", *map(str, folders), "--state", str(tmp_path / "cli")]
    assert main(again) == 1
    assert "2 findings, met again in other parts 1 times; 3 cases left" in " ".join(capsys.readouterr().out.split())
    assert main(again) == 2
    assert "expected a directory that is new or empty" in capsys.readouterr().err
    assert main(["merge", *map(str, folders)]) == 2
    assert "expected --state DIR alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statuses", "not_investigated", "found", "code"),
    [
        ({"pass": 5, "known": 1}, 0, (), 0),
        ({"pass": 5, "fail": 1}, 0, (discovery("step"),), 1),
        ({"pass": 5, "fail": 1}, 1, (), 1),
        ({"pass": 5, "unknown": 1}, 0, (), 3),
        ({"pass": 5, "fail": 1}, 0, (replace(discovery("step"), confirmed=False),), 3),
        ({"unknown": 1}, 1, (), 1),
        ({}, 0, (), 3),
    ],
)
def test_the_parts_have_the_exit_code_of_one_campaign(
    statuses: dict[str, int], not_investigated: int, found: tuple[Discovery, ...], code: int
) -> None:
    whole = Progress("torch-ddp", statuses=statuses, not_investigated=not_investigated)
    assert MergedCampaign(whole, found, 0).exit_code == code


def test_parts_that_do_not_belong_together_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for name, number, more in (
        ("a", 1, {}),
        ("b", 2, {}),
        ("c", 2, {"drawn_by": "seed 4"}),
        ("d", 2, {"shard": (2, 3)}),
        ("e", 1, {"shard": (1, 1)}),
        ("f", 2, {"implementation": "other"}),
        ("g", 2, {"known_by": "of another list"}),
    ):
        part(tmp_path / name, number, **more)
    for names, said in (
        ("a", "part 2 of 2 is missing"),
        ("abc", "part 2 of 2 2 times"),
        ("ac", "c has cases by seed 4, "),
        ("ad", "number of parts 3"),
        ("ae", "e is no part but a whole run"),
        ("af", "f has implementation other"),
        ("ag", "g has known failures of another list, .* not recorded"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            merge_campaigns([tmp_path / name for name in names], tmp_path / "all")
    with pytest.raises(InvalidRecord, match="expected the state of a campaign"):
        merge_campaigns([tmp_path / "a", tmp_path / "nothing"], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_a_part_goes_on_as_that_part_only(tmp_path: Path) -> None:
    part(tmp_path, 1)
    state = StateDirectory(tmp_path, "torch-ddp")
    assert state.load((1, 2), "seed 3").drawn == 4
    for shard, drawn_by in (((2, 2), "seed 3"), ((1, 1), "seed 3"), ((1, 2), "seed 4")):
        with pytest.raises(InvalidRecord, match="got part 1 of 2 of those by seed 3"):
            state.load(shard, drawn_by)


def test_a_part_that_has_drawn_nothing_is_left_whole() -> None:
    empty, ahead = Progress("x", shard=(1, 2)), Progress("x", drawn=2, shard=(2, 2))
    merged = joined_progress([empty, ahead])
    assert (merged.drawn, merged.unfinished) == (4, (0, 2))
