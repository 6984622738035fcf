"""The parts of a campaign draw disjoint cases, together all of it, and become one campaign again, or are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import Scope
from fsdp_testing.cases.records import Case, FailureKind, ModelSpec, Step, Verdict, WorldSpec
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.cli.main import main
from fsdp_testing.errors import InvalidArgument, InvalidRecord
from fsdp_testing.judging.known import KnownFailures
from fsdp_testing.judging.signature import Signature
from fsdp_testing.ranks.pool import Pool
from fsdp_testing.search.campaign import plan as campaign_plan
from fsdp_testing.search.campaign.campaign import Campaign, Plan
from fsdp_testing.search.campaign.writing import findings_in, write_files
from fsdp_testing.search.merging import MergedCampaign, joined, merge_campaigns, total
from fsdp_testing.search.state import State, read_state, write_state


def drawn(shard: tuple[int, int], examples: int, folder: Path) -> list[str]:
    """Identities of the cases that a part draws; nothing is run."""
    plan = Plan(registry.adapter_of("torch-ddp"), Scope(), folder, None, examples, seed=3, shard=shard)
    queue = Campaign(plan, Pool(), lambda _: None, lambda *_: None)._queue
    batches = iter(lambda: queue.next_batch(KnownFailures()), [])
    return [asked.case.identity for batch in batches for asked in batch]


def part(path: Path, number: int, of: int = 2, **more: Any) -> State:
    subject = {"implementation": "torch-ddp", "cases by": "seed 3", "known failures": "none", **more.pop("subject", {})}
    verdicts = {1: "p.ff", 2: "pf.ff"}[number]
    state = State(subject, (number, of), verdicts, runs=number, seconds=1.5)
    state = replace(state, **more)
    write_state(path / "state.json", state)
    return state


def discovery(operation: str) -> Discovery:
    found = Case(ModelSpec("mlp"), WorldSpec(2), (Step(),))
    return Discovery("torch-ddp", Signature(FailureKind.DIVERGED, "loss", operation), found, found, "differs")


def write(found: Discovery, path: Path) -> None:
    write_files(path / "found" / found.name, [("finding.json", found.to_json())])


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
    write_files(folders[1] / "unjudged", [("x.txt", "why")])

    merged = merge_campaigns(reversed(folders), tmp_path / "all")
    # Part 1 drew 0, 2, 4, 6 and part 2 drew 1, 3, 5, 7, 9; of which 2 and 5 did not run, and 8 is missing.
    assert merged.state.verdicts == "pp.ff.ff.f"
    assert merged.state.unfinished == (2, 5, 8)
    assert (merged.state.runs, merged.state.seconds, merged.repeated) == (2, 3.0, 1)
    assert merged.state.shard == (1, 1)
    assert sorted(found.signature.operation for found in merged.discoveries) == ["clip", "step"]
    assert read_state(tmp_path / "all" / "state.json") == merged.state
    assert len(findings_in(tmp_path / "all")) == 2
    assert (tmp_path / "all" / "unjudged" / "x.txt").read_text() == "why"

    again = ["merge", *map(str, folders), "--state", str(tmp_path / "cli")]
    assert main(again) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "5 cases failed; 7 cases in 3.0 s of all parts; 2 findings, found again in other parts 1 time; 3 cases left"
        in told
    )
    assert main(again) == 2
    assert "expected a directory that is new or empty" in capsys.readouterr().err
    assert main(["merge", *map(str, folders)]) == 2
    assert "expected only --state DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verdicts", "variants", "found", "code"),
    [
        ("pppppe", {}, (), 0),
        ("p", {}, (discovery("step"),), 1),
        # A suspect that nobody investigated before its part was interrupted.
        ("pppppf", {}, (), 1),
        ("ppppp", {"fail": 1}, (), 1),
        ("pppppu", {}, (), 3),
        ("ppppp", {"unknown": 1}, (), 3),
        ("pppppu", {}, (replace(discovery("step"), confirmed=False),), 3),
        ("uf", {}, (), 1),
        ("..--", {}, (), 3),
    ],
)
def test_the_parts_have_the_exit_code_of_one_campaign(
    verdicts: str, variants: dict[str, int], found: tuple[Discovery, ...], code: int
) -> None:
    assert MergedCampaign(State({}, verdicts=verdicts, variants=variants), found, 0).exit_code == code


def test_parts_that_do_not_belong_together_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for name, number, more in (
        ("a", 1, {}),
        ("b", 2, {}),
        ("c", 2, {"subject": {"cases by": "seed 4"}}),
        ("d", 2, {"shard": (2, 3)}),
        ("e", 1, {"shard": (1, 1)}),
        ("f", 2, {"subject": {"implementation": "other"}}),
        ("g", 2, {"subject": {"known failures": "of another list"}}),
    ):
        part(tmp_path / name, number, **more)
    for names, said in (
        ("a", "part 2 of 2 is missing"),
        ("abc", "part 2 of 2 2 times"),
        ("ac", "c has cases by seed 4, "),
        ("ad", "number of parts 3"),
        ("ae", "e is a whole run, not a part"),
        ("af", "f has implementation other"),
        ("ag", "g has known failures of another list, .* none"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            merge_campaigns([tmp_path / name for name in names], tmp_path / "all")
    with pytest.raises(InvalidRecord, match="expected the state of a search"):
        merge_campaigns([tmp_path / "a", tmp_path / "nothing"], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def begun(plan: Plan) -> Campaign:
    return Campaign(plan, Pool(), lambda _: None, lambda *_: None)


def test_a_part_goes_on_as_that_part_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(registry.adapter_of("torch-ddp"), Scope(), tmp_path, seed=3, shard=(1, 2))
    begun(plan).save()
    assert begun(plan)._before.shard == (1, 2)
    for other, said in (
        (replace(plan, shard=(2, 2)), "part: expected 2 of 2, got 1 of 2"),
        (replace(plan, shard=(1, 1)), "part: expected 1 of 1, got 1 of 2"),
        (replace(plan, seed=4), "cases by: expected 'seed 4, .* got 'seed 3, "),
        (replace(plan, known=KnownFailures((discovery("step").rule(),))), "known failures: expected"),
        (replace(plan, implementation=registry.adapter_of("torch-fsdp2")), "implementation: expected 'torch-fsdp2'"),
    ):
        with pytest.raises(InvalidRecord, match=said):
            begun(other)
    monkeypatch.setattr(campaign_plan, "source_digest", lambda _: "another")
    with pytest.raises(InvalidRecord, match="the implementation or fsdp-testing has changed since"):
        begun(plan)


def test_a_whole_campaign_goes_on_after_a_change_with_the_next_number_and_says_nothing_of_what_ran_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(registry.adapter_of("torch-ddp"), Scope(), tmp_path, seed=3)
    part(tmp_path, 1, subject=plan.subject, shard=(1, 1), verdicts="pf.ue", variants={"fail": 1})
    assert begun(plan).verdicts.letters == "pf.ue"
    for change in (replace(plan, seed=4), replace(plan, scope=Scope(world_sizes=(3,)))):
        begun(change).save()
        state = read_state(tmp_path / "state.json")
        assert (state.verdicts, state.counts().total(), state.subject) == ("--.--", 0, change.subject)
    with pytest.raises(InvalidRecord, match="implementation: expected 'torch-fsdp2', got 'torch-ddp'"):
        begun(replace(plan, implementation=registry.adapter_of("torch-fsdp2")))


def test_verdicts_are_not_written_down_if_the_text_changed_while_cases_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(Plan(registry.adapter_of("torch-ddp"), Scope(), tmp_path))
    run.save()
    run.verdicts.take(run.verdicts.add_case(), Verdict.PASS)
    monkeypatch.setattr(campaign_plan, "source_digest", lambda _: "another")
    with pytest.raises(InvalidArgument, match="a change of the implementation or of fsdp-testing"):
        run.save()
    assert read_state(tmp_path / "state.json").verdicts == ""


def test_a_part_that_has_drawn_nothing_is_left_whole() -> None:
    merged = joined([State({}, (1, 2)), State({}, (2, 2), "pp")])
    assert merged.verdicts == ".p.p"
    assert joined([State({}, (1, 2)), State({}, (2, 2))]).verdicts == ""
    # What the slower part has not drawn is left; what no part has drawn is drawn by the whole.
    assert joined([State({}, (1, 2), "ppp"), State({}, (2, 2), "p")]).verdicts == "ppp.p"


def test_what_no_part_ran_of_a_list_is_left_and_no_success() -> None:
    """Two parts of a list of pairs that had been interrupted were all right, with "0 cases left"."""
    merged = joined([State({}, (1, 2), "pp", listed=7), State({}, (2, 2), "p", listed=7)])
    assert (merged.verdicts, merged.listed, merged.unfinished) == ("ppp....", 7, (3, 4, 5, 6))
    assert MergedCampaign(merged, (), 0).exit_code == 3
    assert MergedCampaign(replace(merged, verdicts="ppppppp"), (), 0).exit_code == 0


def test_suspects_of_parts_are_suspects_of_the_whole() -> None:
    merged = joined([State({}, (1, 2), "pf", suspects=(1,)), State({}, (2, 2), "ff", suspects=(0,))])
    assert (merged.verdicts, merged.suspects, merged.reopened().verdicts) == ("pfff", (1, 2), "p..f")


def test_counts_are_added_entry_by_entry() -> None:
    one = {"a": {"pass": 1}, "b": {"fail": 2}}
    assert total([one, {"a": {"pass": 3, "unknown": 1}}, {}]) == {"a": {"pass": 4, "unknown": 1}, "b": {"fail": 2}}
    assert total([one]) == one
    assert total([(1, 2), (3,)]) == (1, 2, 3)
