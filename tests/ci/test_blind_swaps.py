"""Which confusions a check would not notice (ci/blind_swaps.py): none that nobody has named, and the tool can see one."""

import re

import pytest
import torch
from blind_swaps import KINDS, PAGE, REASONS, Swap, SwappedReplay, blind_of, halves_exchanged, is_computed, unnoticed

from fsdp_testing.cases.models.unusual import Gated
from fsdp_testing.cases.records import Batch, Case, ForwardBackward, ModelSpec, WorldSpec
from fsdp_testing.checks.suites import CHECKS

pytestmark = pytest.mark.slow  # about a script that people start by hand, not about the packages

CASE = Case(ModelSpec("mlp"), WorldSpec(2), (ForwardBackward(Batch(0)), ForwardBackward(Batch(1))))

CHEAP = (
    "training.same_batch_twice",
    "accumulation.no_sync_then_reduced",
    "accumulation.cleared_after_reduction",
    "unused.parameters_swapped_between_ranks",
    "frozen.unit_in_the_middle",
    "shared.within_a_unit",
    "mixed_precision.param_bfloat16",
    "sizes.zero_dim",
)


@pytest.mark.parametrize("name", [*CHEAP, "*"])
def test_a_check_notices_every_swap_or_says_why_not(name: str) -> None:
    checks = [check for check in CHECKS.values() if name in (check.name, "*") and is_computed(check)]
    assert checks
    for check in checks:
        blind = blind_of(check)
        assert set(blind.asked) <= set(KINDS)
        assert [one for one in unnoticed(check.name, blind) if not one[-1]] == []


def test_a_check_on_symmetric_parameters_is_seen_to_be_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers that are added up have one gradient: their exchange leaves everything as it is."""
    monkeypatch.setattr(
        Gated, "forward", lambda self, x, use: self.always(x) + self.sometimes(x) if use else self.always(x)
    )
    name = "unused.parameters_swapped_between_ranks"
    found = [one for one in unnoticed(name, blind_of(CHECKS[name])) if not one[-1]]
    assert {kind for _, kind, _, _ in found} == {"gradients"}
    assert len(found) == 4


def gradients(swap: Swap) -> dict[str, torch.Tensor]:
    replay = SwappedReplay(CASE, swap)
    point = replay.run()[-1]
    assert replay.committed
    return {quantity.name: value for quantity, value in point.values.items() if quantity.kind == "gradient"}  # type: ignore[misc]


def test_a_swap_is_what_it_is_called() -> None:
    sound = gradients(Swap("parameters", "layers.0.weight", "layers.0.weight"))
    both = Swap("gradients", "layers.0.weight", "layers.1.weight")
    swapped = gradients(both)
    torch.testing.assert_close(swapped["layers.0.weight"], sound["layers.1.weight"], rtol=0, atol=1e-12)
    torch.testing.assert_close(swapped["layers.1.weight"], sound["layers.0.weight"], rtol=0, atol=1e-12)
    shards = gradients(Swap("gradient shards", "layers.2.bias"))["layers.2.bias"]
    torch.testing.assert_close(shards, halves_exchanged(sound["layers.2.bias"]), rtol=0, atol=1e-12)
    signs = [gradients(Swap("sign", rank))["layers.0.weight"] for rank in (0, 1)]
    assert torch.allclose(signs[0], -signs[1], atol=1e-12)
    # g0 + g1 for each backward; the first rank's twice, and the first backward's twice.
    first = gradients(Swap("micro-batch", 1, 0))["layers.0.weight"] / 2
    own = gradients(Swap("rank", 1, 0))["layers.0.weight"]
    assert torch.allclose(own - sound["layers.0.weight"], signs[1], atol=1e-12)
    assert not torch.allclose(first, sound["layers.0.weight"] / 2)


def test_the_page_is_of_checks_that_there_are_and_every_swap_on_it_has_its_reason() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (\d+) \|", text, re.MULTILINE)
    computed = [name for name, check in CHECKS.items() if is_computed(check)]
    assert len(rows) > 20
    for suite, count in rows:
        # A check that was added since stands there once the script has run again.
        assert int(count) <= sum(name.startswith(f"{suite}.") for name in computed)
    assert "**none**" not in text
    assert {reason.why for reason in REASONS} == set(re.findall(r"^\| \S+\.\S+ .*\| ([^|]+) \|$", text, re.MULTILINE))
