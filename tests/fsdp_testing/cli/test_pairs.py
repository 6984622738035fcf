"""`fsdp-verify run NAME --pairs`: what it says is of its own cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import CaseDrawer, Scope, SeededChoices
from fsdp_testing.cli import pairs
from fsdp_testing.cli.main import main
from fsdp_testing.search.campaign.campaign import STATE_FILE, Plan
from fsdp_testing.search.campaign.tally import CampaignTally
from fsdp_testing.search.pairs.covering import Covering
from fsdp_testing.search.pairs.traits import traits_of
from fsdp_testing.search.state import State, write_state


@pytest.mark.parametrize(("subject", "code"), [({}, 0), ({"cases by": "those of another process"}, 2)])
def test_a_state_that_another_process_wrote_meanwhile_says_nothing(
    subject: dict[str, str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its letters were read as those of the own cases."""
    adapter = registry.load("torch-ddp")
    scope = Scope(adapter.drawable(1))
    case = CaseDrawer(scope).draw(SeededChoices(1))
    plan = Plan(adapter, scope, tmp_path, listed=(case,))

    def campaigned(*_: object) -> CampaignTally:
        write_state(tmp_path / STATE_FILE, State({**plan.subject, **subject}, verdicts="p"))
        return CampaignTally()

    made = Covering(tuple(sorted(traits_of(case))), (case,), {}, {}, {})
    monkeypatch.setattr(pairs, "_planned", lambda *_: (made, plan))
    monkeypatch.setattr(pairs, "campaigned", campaigned)
    assert main(["run", "torch-ddp", "--pairs", "--state", str(tmp_path)]) == code


def test_the_choice_of_cases_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes minutes, and was silent."""

    def interrupted(_: Scope) -> Covering:
        raise KeyboardInterrupt

    monkeypatch.setattr("fsdp_testing.search.pairs.covering.covering", interrupted)
    assert main(["run", "torch-ddp", "--pairs", "--state", str(tmp_path)]) == 130
    assert "choosing legal cases" in capsys.readouterr().out
