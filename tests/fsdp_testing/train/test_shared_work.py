"""fsdp-verify train compares first: ranks that share the work on rows, copies that are stepped, and conventions are judged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_testing.cases.records import Verdict
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.train.script import Launch, examine

HERE = Path(__file__).parent


def judge(script, *arguments, size=2, steps=2, **options):
    launch = Launch(str(HERE / f"with_{script}.py"), arguments, steps=steps, isolation="warm", **options)
    return examine(launch, (size,))


def said(report, verdict):
    assert report.verdict is verdict, str(report)
    return str(report)


@pytest.mark.parametrize(
    ("kind", "size", "more", "how"),
    [
        ("tensor", 2, (), "with the same rows at each step, on which 2 ranks work together"),
        ("dtensor", 2, (), "with the same rows at each step, on which 2 ranks work together"),
        ("stages", 2, (), "with the same rows at each step, on which 2 ranks work together"),
        ("sequence", 2, ("--mark",), "with the same rows on each rank, of which forward receives parts"),
        ("sequence", 2, ("--loader",), "with the same rows on each rank, of which forward receives parts"),
        ("sequence", 2, (), "with different arguments of forward: ranks share the work on each row"),
        ("sequence", 2, ("--mark-parts",), "with different arguments of forward: ranks share the work on each row"),
        (
            "sequence",
            2,
            ("--mark-parts", "--loader"),
            "with different arguments of forward: ranks share the work on each row",
        ),
    ],
)
def test_ranks_that_share_the_work_on_the_same_rows_pass(kind, size, more, how):
    text = said(judge("parts", "--kind", kind, *more, size=size), Verdict.PASS)
    assert how in text
    assert re.search(r"compared at each of 2 steps: .*gradients as .*parameters after .*; 8 rows of data", text), text


@pytest.mark.parametrize(
    ("kind", "mistake", "place"),
    [
        ("tensor", "input gradient", r"parameter 0.weight differs between ranks 0 and 1 at step 0.*are not reduced"),
        (
            "tensor",
            "own norm",
            r"parameter 0.weight differs .*backward gives all ranks the same gradient, and then each",
        ),
        ("tensor", "parts sent", r"no rank begins with 24 of the 48 numbers that one process has in parameter 1.up"),
        ("tensor", "bias of each", r"at step 0 .*the loss at this step is not: .*So forward differs, whose work"),
        ("tensor", "summed", r"parameter 0.weight differs between ranks 0 and 1 at step 0"),
        ("dtensor", "summed", r"gradient of 0.weight at step 0"),
        ("stages", "divided", r"gradient of 0.0.weight at step 0"),
        ("stages", "rate of the rank", r"parameter 2.0.weight at step 0"),
        ("sequence --mark", "norm not reduced", r"parameter 0.norm.weight differs between ranks 0 and 1 at step 0"),
        (
            "sequence --mark-parts",
            "norm not reduced",
            r"parameter 0.norm.weight differs between ranks 0 and 1 at step 0",
        ),
    ],
)
def test_a_mistake_of_ranks_that_share_the_work_fails_at_its_place(kind, mistake, place):
    text = said(judge("parts", "--kind", *kind.split(), "--mistake", mistake), Verdict.FAIL)
    assert re.search(place, text, re.S), text
    assert "data are not divided" not in text


def test_ranks_may_load_rows_of_their_own_for_a_part_that_takes_those_of_all():
    assert "on which 3 ranks work together" in said(judge("tables", size=3), Verdict.PASS)
    text = said(judge("tables", "--mistake", "not divided"), Verdict.FAIL)
    assert "gradients of 1 of 3 parameters, first weight, are 2 times those of one process" in text


def test_a_part_that_is_no_module_is_not_recognised():
    assert "call it as a module" in said(judge("tables", "--bare"), Verdict.UNKNOWN)


@pytest.mark.parametrize("kind", ["tensor", "stages"])
def test_parts_that_are_drawn_by_the_rank_cannot_be_compared(kind):
    text = said(judge("parts", "--kind", kind, "--mistake", "seed of the rank"), Verdict.UNKNOWN)
    assert "other parameters than one process has" in text
    assert "draw the whole from one seed on every rank, then take the rank's part" in text


@pytest.mark.parametrize(
    ("kind", "remark"),
    [
        (
            "masters",
            r"the model's own parameters, which the optimizer steps as copies, before the next forward \(4 tensors, 50",
        ),
        ("two", r"learning rate, .*the optimizer's state \(6 tensors"),
        ("players", r"learning rate, .*gradients as the optimizer receives them \(6 tensors, 52 numbers"),
        ("state first", r"the optimizer's state \(12 tensors"),
        (
            "meta",
            r"which differ from those that it draws. Ranks 0 and 1 begin with the same numbers in their shards of 0.weight",
        ),
        ("loaded", r"the optimizer's state \(12 tensors"),
    ],
)
def test_whatever_the_optimizer_steps_is_compared(kind, remark):
    steps = 4 if kind == "players" else 2
    text = said(judge("copies", "--kind", kind, steps=steps), Verdict.PASS)
    assert re.search(remark, text), text


@pytest.mark.parametrize(
    ("kind", "mistake", "place"),
    [
        (
            "masters",
            "not copied back",
            r"the model's own 0.weight differs between ranks 0 and 1 at step 0.*not written back",
        ),
        ("masters", "scaled rate", r"learning rate at step 0 .*multiplied by the number of ranks \(2 times\)"),
        ("flat masters", "not copied back", r"parameter 0.weight differs between ranks 0 and 1 at step 0"),
        ("two", "scaled rate", r"learning rate at step 0 .*learning rate depends on the number of ranks"),
        ("players", "scaled rate", r"learning rate at step 0 .*multiplied by the number of ranks \(2 times\)"),
        ("state first", "scaled rate", r"learning rate at step 0 .*multiplied by the number of ranks \(2 times\)"),
        (
            "loaded",
            "loaded on one",
            r"starts from different .*one process loads the weights of '[\w.]*pretrained', and the ranks",
        ),
        ("meta", "scaled rate", r"learning rate at step 0 .*multiplied by the number of ranks \(2 times\)"),
    ],
)
def test_a_mistake_of_what_is_stepped_fails_at_its_place(kind, mistake, place):
    text = said(judge("copies", "--kind", kind, "--mistake", mistake), Verdict.FAIL)
    assert re.search(place, text, re.S), text
    assert "before the model was wrapped" not in text


def test_an_optimizer_that_cannot_be_read_is_unknown_where_weights_agree_and_no_gradient_was_seen():
    text = said(judge("copies", "--kind", "flat masters"), Verdict.UNKNOWN)
    assert re.search(
        r"the optimizer steps 1 tensors that are neither parameters of the model nor copies of single ones", text
    ), text
    text = said(judge("copies", "--kind", "flat masters", "--mistake", "gradients kept"), Verdict.PASS)
    assert "not compared: the 1 tensors that the optimizer steps, and its state" in text


@pytest.mark.parametrize(
    ("kind", "name"),
    [("batch norm", "batch-norm-per-rank"), ("balance", "loss-per-rank"), ("balance kept", "loss-per-rank")],
)
def test_a_convention_is_named_and_accepted_and_the_rest_is_judged(kind, name):
    text = said(judge("conventions", "--kind", kind), Verdict.FAIL)
    assert f"If this is intended, `--accept {name}` makes one process do the same, and judges the rest." in text
    assert "each rank's own statistic, by design or by mistake" in text
    assert (
        "rows of all ranks: differs; one process that runs the rows of each rank separately, and averages: the same"
        in text
    )
    text = said(judge("conventions", "--kind", kind, accept=(name,)), Verdict.PASS)
    assert f"accepted: {name}: " in text
    assert "which runs the rows of each rank separately and averages" in text
    text = said(judge("conventions", "--kind", kind, "--mistake", "summed", accept=(name,)), Verdict.FAIL)
    assert re.search(r"gradient of \S+weight at step 0", text), text


def test_what_differs_beside_a_convention_is_no_statistic_of_a_rank():
    text = said(judge("conventions", "--kind", "balance", "--mistake", "summed"), Verdict.FAIL)
    assert "one process that runs the rows of each rank separately, and averages: differs, too" in text
    assert "each rank's own statistic" not in text


def test_a_convention_that_is_accepted_and_not_there_is_said():
    text = said(judge("conventions", "--kind", "dropout", accept=("batch-norm-per-rank",)), Verdict.PASS)
    assert "accepted: batch-norm-per-rank: not there" in text
    assert "not compared: dropout, switched off" in text


def test_an_unknown_convention_is_refused_before_anything_runs():
    with pytest.raises(InvalidArgument, match=r"expected some of scheduler-per-process, .*got 'batchnorm'"):
        judge("conventions", accept=("batchnorm",))


def test_a_script_that_ends_itself_with_words_is_quoted():
    text = said(judge("conventions", "--kind", "message"), Verdict.UNKNOWN)
    assert (
        'ended itself by sys.exit("no data here: make them first") at with_conventions.py:17. Fix the error that it reports'
        in text
    )
    assert "arguments it needs" not in text


@pytest.mark.parametrize(
    ("where", "name"), [("function", "average"), ("exit", "average"), ("object", "ema.hooks[0].shadow")]
)
def test_a_moving_average_is_compared_wherever_a_script_keeps_it_and_however_it_ends(where, name):
    told = f"weights kept as {name!r}"
    assert f"compared at the end: {told}" in said(judge("averages", "--where", where, steps=5), Verdict.PASS)
    text = said(judge("averages", "--where", where, "--mistake", steps=5), Verdict.FAIL)
    assert told in text and "this copy of them does not: its decay" in text, text


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("far", "2 of 2 tensors of 'ema.hooks[0].shadow', which have the shapes of weights and are no means of them"),
        ("nowhere", "'ema', in which no copy of the weights was found"),
    ],
)
def test_a_moving_average_that_cannot_be_compared_is_named(where, told):
    assert f"not compared: {told}" in said(judge("averages", "--where", where, "--mistake", steps=5), Verdict.PASS)


OUTDATED = (
    "rank 1 computes with 'teacher', a copy of the weights that has other numbers there than elsewhere. Update it"
)


def test_a_copy_that_a_rank_uses_and_does_not_update_is_no_pass():
    """Of a small rate the numbers that it gives are those of one process within roundings; of a large one they are not."""
    stale = ("teacher", "--updated-on", "rank 0")
    assert f"but {OUTDATED}" in said(judge(*stale, "--rate", "1e-6", steps=3), Verdict.UNKNOWN)
    assert f"Cause: {OUTDATED}" in said(judge(*stale, "--rate", "0.5", steps=3), Verdict.FAIL)
    for right in (("teacher", "--rate", "0.5"), (*stale, "--used", "on rank 0"), (*stale, "--used", "never")):
        text = said(judge(*right, steps=3), Verdict.PASS)
        assert "weights kept as 'teacher'" in text
        assert ("not compared: 'teacher' of rank 1, which has other numbers than that of another rank" in text) == (
            "rank 0" in right
        )
