"""Every pair of traits is in a case, or has the reason why it is in none; the matrix says what became of it."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import CaseDrawer, Scope, SeededChoices, legal_case, needs_of_case
from fsdp_testing.cases.operations import Batch, Clip, ForwardBackward, Step
from fsdp_testing.cases.records import Case, MixedPrecisionSpec, ModelSpec, Verdict, WorldSpec, WrappingPlan
from fsdp_testing.judging.known import KnownFailures, Rule
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.report.html import html_text
from fsdp_testing.report.terminal import Output, print_sheet
from fsdp_testing.search.campaign import campaign as campaign_module
from fsdp_testing.search.campaign.campaign import STATE_FILE, Campaign, Plan
from fsdp_testing.search.campaign.tally import CampaignTally
from fsdp_testing.search.campaign.writing import write_discovery
from fsdp_testing.search.pairs import covering as covering_module
from fsdp_testing.search.pairs.covering import Covering, covering
from fsdp_testing.search.pairs.matrix import (
    FAILS,
    HOLDS,
    KNOWN,
    NOT_EXPRESSIBLE,
    OPEN,
    REFUSED,
    UNKNOWN,
    pairs_sheet,
    summary_of,
)
from fsdp_testing.search.pairs.traits import traits_of, why_apart, with_options
from fsdp_testing.search.state import Reason, State, read_state

BESIDE = str(Path(__file__).parents[1] / "campaign")
if BESIDE not in sys.path:
    sys.path.insert(0, BESIDE)

LINEAR = {"kind": "linear", "name": "a", "out": 2}
TRAINED = ForwardBackward(Batch(1, (2,)))


def case(*program: object, nodes: tuple[object, ...] = (LINEAR,), **fields: object) -> Case:
    model = ModelSpec("tree", tree={"width": 2, "nodes": list(nodes)})
    return Case(model, WorldSpec(2), program or (TRAINED,), **fields)  # type: ignore[arg-type]  # as the test says them


# ----------------------------------------------------------------------------------------------- which cases


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covering_module, "DRAWN", 300)
    monkeypatch.setattr(covering_module, "DRAWN_OF_ALL", 200)
    monkeypatch.setattr(covering_module, "_EXAMPLES", 1)
    monkeypatch.setattr(covering_module, "_mixed", lambda one, other: [replace(one, program=other.program)])


@pytest.mark.usefixtures("few_draws")
def test_every_pair_is_in_a_case_or_has_a_reason_why_it_is_in_none():
    scope = Scope(frozenset({"full_shard", "no_sync", "clip_grad_norm", "late_optimizer"}), (2, 3))
    made = covering(scope)
    met = {pair for each in made.cases for pair in combinations(sorted(traits_of(each)), 2)}
    closed = {**made.not_claimed, **made.not_expressible, **made.not_met}
    assert sorted(met & set(closed)) == []
    assert met | set(closed) == set(combinations(made.traits, 2))
    assert all(closed.values())
    assert "strategy:no_shard" in made.traits
    assert "no_shard" in made.not_claimed["clip", "strategy:no_shard"]
    assert made.not_expressible["world:2", "world:3"] == "a case has one value of world"
    assert made.cases == covering(scope).cases  # a campaign goes on with the same numbers


def test_no_legal_case_has_a_pair_that_is_said_to_be_impossible():
    drawer, scope = CaseDrawer(Scope(world_sizes=(2, 3, 4))), Scope()
    for seed in range(500):
        choices = SeededChoices(seed)
        drawn = legal_case(with_options(drawer.draw(choices), choices), scope.capabilities)
        impossible = [(pair, why) for pair in combinations(sorted(traits_of(drawn)), 2) if (why := why_apart(*pair))]
        assert not impossible, drawn.to_json()


@pytest.mark.parametrize(
    ("illegal", "lost"),
    [
        (case(mixed_precision=MixedPrecisionSpec("bfloat16"), nodes=({**LINEAR, "strided": True},)), "strided_parameters"),
        (case(strategy="full_shard", nodes=(LINEAR,), wrapping=WrappingPlan(checkpointed=("lost",))), "recomputed:inside"),
        (
            case(
                nodes=({"kind": "group", "name": "g", "nodes": [{"kind": "buffer", "name": "c", "style": "counter"}, LINEAR]},),
                wrapping=WrappingPlan(checkpointed=("g",)),
            ),
            "recomputed:inside",
        ),
    ],
)  # fmt: skip
def test_both_traits_set_directly_one_is_taken_away(illegal: Case, lost: str):
    assert lost in traits_of(illegal)
    assert lost not in traits_of(legal_case(illegal))


@pytest.mark.parametrize(
    ("plan", "hidden"),
    [
        (WrappingPlan(("g",), checkpointed=("g",)), True),
        (WrappingPlan(("g",), checkpointed=("g",), checkpoint_outside=True), False),
        (WrappingPlan(("b",), checkpointed=("g",)), False),
        (WrappingPlan(("g",), checkpointed=("b",)), False),
    ],
)
def test_what_runs_again_behind_objects_is_asked_where_a_unit_shows_its_outputs(plan: WrappingPlan, hidden: bool):
    opaque = {"kind": "group", "name": "g", "nodes": [LINEAR], "returns": "opaque"}
    legal = legal_case(case(nodes=(opaque, {**LINEAR, "name": "b"}), wrapping=plan))
    assert {"returns:opaque", "recomputed:around" if plan.checkpoint_outside else "recomputed:inside"} <= traits_of(
        legal
    )
    assert ("hidden_recomputation" in needs_of_case(legal)) is hidden


def test_a_pair_that_no_draw_has_is_made_of_two_cases():
    scope = Scope(world_sizes=(2,))
    drawn = covering_module._Pool(scope)
    drawn.draw(40)
    missing = [pair for pair in combinations(sorted(drawn.numbers), 2) if not drawn.has(pair) and not why_apart(*pair)]
    of_programs = [
        pair for pair in missing if set(pair) <= {"step", "clip", "freeze", "save", "thaw", "set_lr", "move"}
    ]
    made = [pair for pair in of_programs if drawn.make(pair)]
    assert made == of_programs != []
    assert all(drawn.has(pair) for pair in made)


def test_pairs_hold_what_campaigns_do_not_draw():
    drawn = covering_module._Pool(Scope(registry.load("fsdp_ref-composable").capabilities))
    drawn.draw(300)
    assert {
        "edit_gradients:none",
        "assign_data:in_place",
        "local_micro_batches:nested",
        "unusual_backward:of_inputs",
    } <= set(drawn.numbers)


@pytest.mark.slow
def test_every_pair_of_the_reference_has_a_fate():
    adapter = registry.load("fsdp_ref-composable")
    assert not covering(Scope(adapter.capabilities, (2, 3, 4))).not_met


# ----------------------------------------------------------------------------------------------- what became of them

CASES = tuple(case(*program) for program in ((TRAINED,), (TRAINED, Step()), (TRAINED, Clip(1.0))))


def listed(*cases: Case, **closed: dict[tuple[str, str], str]) -> Covering:
    traits = tuple(sorted(set().union(*map(traits_of, cases))))
    return Covering(traits, cases, closed.get("claims", {}), closed.get("apart", {}), {})


def became(letters: str, pair: tuple[str, str], reasons: dict[str, Reason] | None = None) -> str:
    summary = summary_of("x", {}, listed(*CASES), State({}, verdicts=letters, reasons=reasons or {}))
    return summary.word(summary.traits.index(pair[1]), summary.traits.index(pair[0]))


def test_a_pair_holds_if_one_case_that_has_it_passes_else_it_is_what_these_are():
    both = ("dtype:float64", "forward_backward")
    stepped = ("forward_backward", "step")
    assert became("ppp", both) == became("ffp", both) == HOLDS
    assert became("fpp", stepped) == HOLDS
    assert became("pfp", stepped) == FAILS
    assert became("pep", stepped) == KNOWN
    assert became("pup", stepped) == UNKNOWN
    assert became("p.p", stepped) == became("p", stepped) == OPEN
    refusal = Reason("cannot", ("raised", "NotImplementedError: cannot", "step"), refused=True)
    assert became("pfp", stepped, {"1": refusal}) == REFUSED
    # What another class of this name says is no refusal.
    assert became("pfp", stepped, {"1": replace(refusal, refused=False)}) == FAILS


def test_the_exit_code_is_that_of_the_cases():
    codes = {"ppp": 0, "ppe": 0, "pfp": 1, "pup": 3, "fup": 1, "...": 3}
    for letters, code in codes.items():
        assert summary_of("x", {}, listed(*CASES), State({}, verdicts=letters)).exit_code == code, letters


def test_terminal_and_page_show_what_does_not_hold_and_why_the_rest_was_not_asked(capsys: pytest.CaptureFixture[str]):
    reasons = {"2": Reason("total norm is off by 1")}
    apart = {("clip", "step"): "they never meet"}
    summary = summary_of("x", {}, listed(*CASES, apart=apart), State({}, verdicts="ppf", reasons=reasons))
    sheet = pairs_sheet(summary)
    print_sheet(sheet, Output(file=sys.stdout, width=120))
    shown = capsys.readouterr().out
    assert "clip with forward_backward: total norm is off by 1" in " ".join(shown.split())
    assert "1 pair: they never meet" in shown
    page = html_text(sheet)
    assert "forward_backward with clip: fails" in page
    assert summary.word(summary.traits.index("step"), summary.traits.index("clip")) == NOT_EXPRESSIBLE
    assert '"they never meet"' in summary.to_json()
    assert sheet.exit_code == 1
    assert "pairs that were asked hold" in sheet.conclusion


def test_a_case_that_fails_is_counted_although_each_of_its_pairs_holds_elsewhere():
    summary = summary_of("x", {}, listed(CASES[0], CASES[0]), State({}, verdicts="pf"))
    assert summary.exit_code == 1
    assert summary.conclusion.endswith("pairs that were asked hold; cases that fail: 1 of 2")


# ----------------------------------------------------------------------------------------------- with ranks


def asked(name: str, cases: tuple[Case, ...], state: Path, **plan: object) -> Campaign:
    adapter = registry.load(name)
    every = Plan(
        adapter, Scope(adapter.capabilities), state, seconds=None, lanes=1, listed=cases, shrink_seconds=1.0, **plan
    )  # type: ignore[arg-type]
    campaign = Campaign(every, default_pool(), lambda _: None, write_discovery)
    campaign.run()
    return campaign


def test_pairs_with_what_is_wrong_fail_and_a_second_run_asks_nothing_again(tmp_path: Path):
    cases = tuple(replace(each, strategy="no_shard") for each in CASES)
    first = asked("fuzz_faults:WRONG_IN_CLIP", cases, tmp_path)
    assert [first.verdicts[number] for number in range(3)] == [Verdict.PASS, Verdict.PASS, Verdict.FAIL]
    summary = summary_of("toy", {}, listed(*cases), read_state(tmp_path / STATE_FILE))
    failing = {pair for pair in summary.wrong if pair[2] == FAILS}
    assert failing
    assert all("clip" in pair[:2] for pair in failing)
    assert all("clip" in why or "norm" in why or "off by" in why for *_, why in failing)
    again = asked("fuzz_faults:WRONG_IN_CLIP", cases, tmp_path)
    assert again.tally.drawn == 0
    assert again.verdicts.letters == first.verdicts.letters
    assert summary_of("toy", {}, listed(*cases), read_state(tmp_path / STATE_FILE)) == summary


def test_a_listed_case_is_investigated_though_others_looked_like_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It was left as a failure of which nothing is known, after three of the same look that were known ones."""
    monkeypatch.setattr(campaign_module, "AT_FIRST", 0)
    campaign = asked("fuzz_faults:WRONG_IN_CLIP", (replace(CASES[2], strategy="no_shard"),), tmp_path)
    assert campaign.tally.discovered
    assert not campaign.tally.not_investigated


def test_what_an_earlier_run_found_is_no_known_failure_after_a_change(tmp_path: Path):
    """Its folder stays, and with it a rule; the cases are asked again, and the same fault was a pass."""
    cases = (CASES[0], replace(CASES[2], strategy="no_shard"))
    assert asked("fuzz_faults:WRONG_IN_CLIP", cases, tmp_path).verdicts.letters == "pf"
    other = KnownFailures((Rule("other", "why", signatures=(("hung",),)),))
    again = asked("fuzz_faults:WRONG_IN_CLIP", cases, tmp_path, known=other)
    assert (again.tally.drawn, again.verdicts.letters) == (2, "pf")
    assert summary_of("toy", {}, listed(*cases), read_state(tmp_path / STATE_FILE)).exit_code == 1


def test_what_a_run_met_beside_its_cases_counts():
    state = State({}, verdicts="ppp")
    for met, code in (({"found_before": {"x": 1}}, 1), ({"unjudged": {"x": 1}}, 3)):
        tally = CampaignTally(**{name: Counter(counts) for name, counts in met.items()})
        assert summary_of("x", {}, listed(*CASES), state, tally).exit_code == code


def test_a_part_asks_its_share_of_the_cases(tmp_path: Path):
    campaign = asked(
        "fuzz_faults:WRONG_IN_CLIP", tuple(replace(c, strategy="no_shard") for c in CASES), tmp_path, shard=(2, 2)
    )
    assert campaign.verdicts.letters == "p"
    state = read_state(tmp_path / STATE_FILE)
    summary = summary_of("toy", {}, listed(*CASES), state)
    assert summary.counts[HOLDS]
    assert not summary.counts.get(FAILS)
