"""A claim that raises NotImplementedError is reported as such, with the place; other exceptions as they are."""

from __future__ import annotations

from fsdp_testing.cases.records import Batch, Case, Clip, ForwardBackward, ModelSpec, RaisedError, WorldSpec
from fsdp_testing.judging.checkers.explain import raised_finding

CASE = Case(ModelSpec("mlp"), WorldSpec(2), (ForwardBackward(Batch(0)), Clip(0.1)))
TRACEBACK = """Traceback (most recent call last):
  File "/here/execute.py", line 3, in run
    clip()
  File "/there/adapter.py", line 12, in clip
    raise NotImplementedError("not yet")
NotImplementedError: not yet
"""


def error(**fields: object) -> RaisedError:
    values = {"index": 1, "type_name": "NotImplementedError", "message": "not yet", "traceback": TRACEBACK}
    return RaisedError(**{**values, **fields})  # type: ignore[arg-type]  # fields by name


def test_a_claim_that_is_not_kept_is_told_with_its_place() -> None:
    found = raised_finding(CASE, {0: error(not_supported=True), 1: error(not_supported=True)})
    assert found.explanation == (
        "in operation 1 clip(max_norm=0.1): it claims clip_grad_norm, but every rank raised NotImplementedError: "
        "not yet, at /there/adapter.py:12"
    )
    assert found.kind == "raised"
    assert "--- rank 1" in found.detail


def test_the_place_of_an_account_without_frames_is_not_made_up() -> None:
    found = raised_finding(CASE, {1: error(not_supported=True, traceback="NotImplementedError")})
    assert found.refused
    assert not raised_finding(CASE, {1: error(not_supported=False)}).refused
    assert found.explanation.endswith(
        "it claims clip_grad_norm, but rank 1 raised NotImplementedError: not yet, at an unknown place"
    )


def test_another_exception_is_told_without_a_claim() -> None:
    found = raised_finding(CASE, {1: error(type_name="ValueError", message="no\nmore")})
    assert found.explanation == "in operation 1 clip(max_norm=0.1): rank 1 raised ValueError: no"
