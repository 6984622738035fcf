"""Findings look alike when kind, sort of quantity and operation are the same, whatever the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_testing.cases.records import (
    Batch,
    Case,
    FailureKind,
    Finding,
    Forward,
    ForwardBackward,
    Mismatch,
    ModelSpec,
    RaisedError,
    Step,
    WorldSpec,
    ZeroGrad,
)
from fsdp_testing.judging.checkers.divergence import Divergence
from fsdp_testing.judging.checkers.explain import finding_of, raised_finding
from fsdp_testing.judging.signature import Signature, fine_signature_of, signature_of
from fsdp_testing.oracle.quantities import Quantity

PROGRAM = (ForwardBackward(Batch(0), no_sync=True), ForwardBackward(Batch(1)), Step(), Forward(Batch(2), "eval"))
CASE = Case(ModelSpec("mlp"), WorldSpec(2), PROGRAM)
GRADIENT = Quantity("gradient", "layers.0.weight")
DIVERGED = FailureKind.DIVERGED


def finding(quantity: Quantity = GRADIENT, index: int = 1, kind: FailureKind = DIVERGED, **facts: Any) -> Finding:
    facts = {"sentence": "is off by 0.3", "max_error": 0.3, "ranks": (0,), **facts}
    divergence = Divergence(kind, quantity, index, **facts)
    return finding_of(CASE, divergence, [divergence])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (finding(), "diverged gradient in forward_backward"),
        (finding(Quantity("value", "a.b"), 2), "diverged value and optimizer state in step"),
        (finding(Quantity("optimizer", "a.b", "exp_avg"), 2), "diverged value and optimizer state in step"),
        (finding(Quantity("optimizer", "a.b", "exp_avg")), "diverged optimizer exp_avg in forward_backward"),
        (finding(Quantity("buffer", "norm.mean", rank=1), 3), "diverged buffer in forward"),
        (finding(Quantity("result", "loss", rank=0), 3), "diverged output in forward"),
        (finding(Quantity("result", "output.2", rank=1), 1), "diverged output in forward"),
        (finding(Quantity("result", "total_norm"), 4), "diverged total_norm in end"),
        (finding(mismatch=Mismatch.NONE, max_error=None), "diverged gradient is None in forward_backward"),
        (finding(kind=FailureKind.MISSING), "missing gradient in forward_backward"),
    ],
)
def test_what_a_divergence_looks_like(found: Finding, expected: str) -> None:
    assert str(signature_of(found)) == expected


def test_an_exception_looks_like_its_type_and_message_without_what_varies() -> None:
    error = RaisedError(-1, "ValueError", "12 of ranks 0 and 1 is not 'good' for layers.0.weight\nmore", "")
    assert signature_of(raised_finding(CASE, {1: error})) == (
        FailureKind.ONE_RAISED,
        "ValueError: # of ranks # is not _ for _",
        "build",
    )
    assert signature_of(raised_finding(CASE, {0: error, 1: error})).kind is FailureKind.RAISED
    flat = RaisedError(-1, "RuntimeError", "a.c._flat_param contains _flat_param", "")
    assert signature_of(raised_finding(CASE, {0: flat, 1: flat})).quantity == "RuntimeError: _ contains _flat_param"


def test_different_collectives_look_alike_whether_one_rank_notices_or_all_do() -> None:
    error = RaisedError(0, "fsdp_testing.errors.CollectiveMismatch", "collective #4 of the default group differs", "")
    one, all_ranks = (signature_of(raised_finding(CASE, dict.fromkeys(ranks, error))) for ranks in ([1], [0, 1]))
    assert one == all_ranks
    assert one.kind is FailureKind.ONE_RAISED


def test_an_operator_is_followed_by_a_colon_or_not() -> None:
    texts = [f"aten._foreach_add_.List{colon} got mixed torch.Tensor and DTensor" for colon in (":", "")]
    findings = [raised_finding(CASE, {0: RaisedError(-1, "RuntimeError", text, "")}) for text in texts]
    assert len({signature_of(each).quantity for each in findings}) == 1


def test_a_key_of_saved_state_is_left_out_whatever_the_parameter_is_called() -> None:
    names = ("a.weight", "first.temperature", "a.b.scale")
    keys = [f"Missing key in checkpoint state_dict: optimizer.state.{name}.step." for name in names]
    errors = [RaisedError(-1, "RuntimeError", key, "") for key in keys]
    quantities = {signature_of(raised_finding(CASE, {0: error})).quantity for error in errors}
    assert quantities == {"RuntimeError: Missing key in checkpoint state_dict: _."}


def test_which_attribute_is_missing_counts() -> None:
    error = RaisedError(-1, "AttributeError", "'Unit' object has no attribute '_full'; see 'layers.0.weight'", "")
    looks = signature_of(raised_finding(CASE, {0: error, 1: error})).quantity
    assert looks == "AttributeError: 'Unit' object has no attribute '_full'; see _"


def test_the_order_in_which_a_set_is_written_says_nothing() -> None:
    """A set of dtypes comes in the order of their addresses, another one in each run (FSDP2's "uniform gradient dtype")."""
    texts = ("got {torch.bfloat16, torch.float32}", "got {torch.float32, torch.bfloat16}", "got {torch.float32}")
    errors = (RaisedError(-1, "AssertionError", text, "") for text in texts)
    one, other, less = (signature_of(raised_finding(CASE, {0: error, 1: error})) for error in errors)
    assert one == other != less
    assert one.quantity == "AssertionError: got {torch.bfloat#, torch.float#}"


def test_the_sentence_has_no_part_in_it() -> None:
    other = finding(sentence="has another dtype, or none", max_error=7.0, ranks=(0, 1))
    assert signature_of(finding()) == signature_of(other)


def test_lost_ranks_look_like_the_way_in_which_they_were_lost() -> None:
    died = Finding(FailureKind.DIED, "the run", -1, "", (1,), "rank 1 died", CASE, message="SIGKILL")
    assert signature_of(died) == Signature(FailureKind.DIED, "SIGKILL")


def test_place_counts_in_the_fine_signature() -> None:
    fine = fine_signature_of(finding())
    assert (fine.fqn, fine.model, fine.strategy) == ("layers.0.weight", "mlp", "full_shard")
    assert fine != fine_signature_of(finding(Quantity("gradient", "layers.1.weight")))


def test_a_local_micro_batch_is_a_kind_of_its_own_and_modes_are_not() -> None:
    shapes = [operation.shape() for operation in PROGRAM]
    assert shapes == ["forward_backward(no_sync)", "forward_backward", "step", "forward"]
    words = [operation.words() for operation in (*PROGRAM, ZeroGrad())]
    assert words == ["forward-backward in no_sync", "forward-backward", "step", "eval-forward", "zero_grad"]


def test_documents_of_earlier_versions_may_use_the_former_name() -> None:
    assert FailureKind("desynchronised") is FailureKind.UNCOORDINATED
    with pytest.raises(ValueError, match="nonsense"):
        FailureKind("nonsense")
