"""fsdp-verify train --fault: the script stops and says why, what it saved is usable, or it computes the same."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdp_testing.cases.records import Verdict
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.judging.worlds import usable_processors
from fsdp_testing.ranks.faults.fault import Fault
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.train import running
from fsdp_testing.train.faulted import is_damaged, judge_faults
from fsdp_testing.train.running import Runner
from fsdp_testing.train.script import Launch, examine

SCRIPT = Path(__file__).parent / "with_extras.py"
LAUNCH = Launch(str(SCRIPT), steps=6, isolation="warm", timeout=60.0)


@pytest.fixture(scope="module")
def with_fault():
    runner = Runner(LAUNCH, default_pool())
    runs = {size: runner.run(size) for size in (1, 2, 3)}

    def judge(*faults, size=2, seconds=(), **changes):
        launch = replace(LAUNCH, **changes)
        faulty = replace(launch, faults=tuple(map(Fault.parse, faults)))
        return judge_faults(
            Runner(launch, default_pool()), runs, size, Runner(faulty, default_pool(), seconds=[*seconds])
        )

    return judge


def holds(judgement, verdict, pattern):
    assert judgement.verdict is verdict, judgement
    assert re.fullmatch(pattern, judgement.sentence, re.DOTALL), judgement.sentence


CLOSED = r"raised RuntimeError: .*(Connection closed by peer|Connection reset by peer).*"


@pytest.mark.parametrize(("size", "others"), [(2, "rank 0"), (3, "rank(s 0, 2| 0 .* rank 2)")])
def test_ranks_that_lose_a_peer_stop_and_go_on_later_from_what_was_saved(with_fault, size, others):
    judgement = with_fault("crash@rank=1,step=3", size=size, resume_arguments=("--load", "state.pt"))
    same = r"\(weights, optimizer's state and settings, rows, and 3 steps\)"
    holds(
        judgement,
        Verdict.PASS,
        rf"rank 1 died by SIGKILL; {others} {CLOSED} Started again from what it had saved, it continues as the run "
        rf"without a fault {same}\.",
    )


def test_what_is_not_restored_shows_after_a_crash(with_fault):
    changes = {"resume_arguments": ("--mistake", "optimizer not loaded"), "arguments": ()}
    judgement = with_fault("crash@rank=1,step=3", **changes)
    holds(
        judgement,
        Verdict.FAIL,
        r"with what it had saved by then \(state.pt\) resumed .* optimizer begins without state.*",
    )


def test_a_rank_that_dies_while_it_overwrites_its_only_checkpoint_leaves_nothing_to_go_on_from(with_fault):
    judgement = with_fault("crash@rank=0,save=3")
    holds(
        judgement,
        Verdict.FAIL,
        r"every file that it had saved is damaged: state.pt. Write a new file, read it again, .*",
    )
    resumed = with_fault("crash@rank=0,save=3", resume_arguments=("--load", "state.pt"))
    holds(resumed, Verdict.FAIL, r"with what it had saved by then \(state.pt\) did not end well: .*")


@pytest.mark.parametrize(("save", "verdict"), [(6, Verdict.FAIL), (2, Verdict.PASS)])
def test_a_run_that_ends_well_and_leaves_damaged_files_alone_has_not_passed(with_fault, save, verdict):
    judgement = with_fault(f"corrupt@rank=0,save={save}")
    assert judgement.verdict is verdict, judgement
    if verdict is Verdict.FAIL:
        assert "every file that it had saved is damaged: state.pt" in judgement.sentence
    else:
        assert "saved state.pt" in judgement.compared


def test_ranks_that_wait_for_ever_are_a_failure(with_fault):
    # The run of one process was slow: ranks have longer than the timeout that was given.
    judgement = with_fault("hang@rank=1,step=2", timeout=1.0, seconds=[6.0 / running._SLOWER])
    waited = 6.0 * max(1.0, 2 / usable_processors())
    holds(
        judgement,
        Verdict.FAIL,
        rf"rank 1 hung .*; rank 0 did not stop within {waited:g} s "
        r"\(rank 0 waits in all_reduce\(sum\) #\d+ .* at .*with_extras.py:\d+ "
        r".*\). Give torch.distributed.init_process_group a timeout, and the job a watchdog.",
    )


def test_a_full_disk_stops_the_rank_that_saves_and_its_peer(with_fault):
    judgement = with_fault("full-disk@rank=0,save=2")
    assert judgement.verdict is Verdict.FAIL
    assert "is damaged: state.pt" in judgement.sentence  # the second save has cut the first one short


@pytest.mark.parametrize("kind", ["crash", "hang"])
def test_a_fault_that_keeps_every_rank_shows_nothing(with_fault, kind):
    judgement = with_fault(f"{kind}@step=2", timeout=6.0)
    holds(judgement, Verdict.UNKNOWN, r".*ranks 0, 1.*: the faults hit every rank, so none could show how it stops.*")


def test_a_fault_that_cannot_be_made_says_nothing_of_the_script(with_fault):
    judgement = with_fault("corrupt@collective=1")
    assert judgement.verdict is not Verdict.PASS, judgement


def test_what_is_no_archive_is_not_damaged(tmp_path):
    path = tmp_path / "train.bin"
    for content, damaged in ((b"\x01\x02 rows of tokens", False), (b"", True), (b"PK\x03\x04 cut off", True)):
        path.write_bytes(content)
        assert is_damaged(path) is damaged, content
    torch.save({"weight": torch.ones(2)}, path)
    assert not is_damaged(path)


def test_what_changes_nothing_passes(with_fault):
    judgement = with_fault("delay=0.1@rank=1,collective=3", "clock=+3600")
    holds(judgement, Verdict.PASS, "every rank continues to the end. 6 steps match those of the run without a fault")


@pytest.mark.parametrize("step", [2, 5])
def test_ranks_that_silently_come_apart_are_a_failure(with_fault, step):
    judgement = with_fault(f"corrupt@rank=1,step={step}")
    apart = rf"every rank continues to the end. ranks do not hold the same: parameter .* at step {step}.*"
    holds(judgement, Verdict.FAIL, apart)


def test_numbers_that_are_silently_wrong_on_every_rank_are_a_failure(with_fault):
    judgement = with_fault("corrupt@step=2")
    holds(
        judgement,
        Verdict.FAIL,
        r"every rank continues to the end. differs from the run without a fault: gradient .* at step 2 .*",
    )
    assert judgement.first.step == 2


@pytest.mark.parametrize("place", ["step=40", "collective=4000", "save=7"])
def test_a_fault_that_is_not_reached_is_unknown(with_fault, place):
    judgement = with_fault(f"crash@rank=0,{place}")
    holds(
        judgement,
        Verdict.UNKNOWN,
        rf"never reaches the fault crash@rank=0,{place}: it makes rank 0: \d+, rank 1: .* 6 optimi.*",
    )


def test_a_rank_that_ends_as_if_all_were_well_is_a_failure(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "rows = torch.randn(4, 6, 4)\n"
        "try:\n"
        "    for step in range(4):\n"
        "        model(rows[step][dist.get_rank() :: dist.get_world_size()]).square().mean().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "except RuntimeError as error:\n"
        "    print('training stopped', error)\n"
        "    sys.exit(0)\n"
    )
    launch = Launch(str(script), steps=4, isolation="warm", timeout=60.0, faults=(Fault.parse("crash@rank=1,step=2"),))
    report = examine(launch, (2,))
    assert [judgement.verdict for judgement in report.judgements] == [Verdict.PASS, Verdict.FAIL], str(report)
    assert report.judgements[1].owner == "--fault crash@rank=1,step=2 on 2 ranks"
    assert "rank 0 ended without an error after" in report.judgements[1].sentence
    assert report.exit_code == 1


TWO_OPTIMIZERS = """
import torch, torch.distributed as dist

dist.init_process_group('gloo')
torch.manual_seed(0)
model = torch.nn.Linear(4, 2).double()
optimizers = [torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)]
rows = torch.randn(4, 6, 4).double()
for step in range(4):
    total, largest = torch.ones(2), torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(total)  # of neither is anything made
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    model.zero_grad()
    model(rows[step][dist.get_rank() :: dist.get_world_size()]).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    for optimizer in optimizers:
        optimizer.step()
"""


@pytest.fixture(scope="module")
def two_optimizers(tmp_path_factory):
    script = tmp_path_factory.mktemp("two") / "train.py"
    script.write_text(TWO_OPTIMIZERS)

    def judge(fault):
        launch = Launch(str(script), steps=4, isolation="warm", timeout=60.0, faults=(Fault.parse(fault),))
        return examine(launch, (2,)).judgements[-1]

    return judge


def test_a_step_of_two_optimizers_is_one_as_train_counts_them(two_optimizers):
    judgement = two_optimizers("corrupt@step=2")
    holds(
        judgement,
        Verdict.FAIL,
        r"every rank continues to the end. differs from the run without a fault: .* at step "
        r"2 .*",
    )
    assert judgement.first.step == 2


def test_collectives_in_another_order_that_change_no_number_pass_and_are_told(two_optimizers):
    judgement = two_optimizers("reorder@rank=1,collective=1")
    holds(judgement, Verdict.PASS, "every rank continues to the end. 4 steps match those of the run without a fault")
    assert judgement.compared[-1].startswith("with the fault, ranks disagree: "), judgement.compared


def test_a_last_collective_has_none_to_come_behind(two_optimizers):
    judgement = two_optimizers("reorder@rank=1,collective=16")
    holds(judgement, Verdict.UNKNOWN, r"never reaches the fault reorder@rank=1,collective=16: .* \(--steps\)\.")


def test_faults_that_exclude_each_other_are_refused_before_anything_runs():
    faults = tuple(map(Fault.parse, ("crash@rank=1,step=1", "delay=1@step=1")))
    with pytest.raises(InvalidArgument, match="expected delay=1@step=1 to happen"):
        examine(replace(LAUNCH, faults=faults), (2,))


def test_a_rank_that_no_world_has_is_refused():
    with pytest.raises(InvalidArgument, match="expected ranks of one of the worlds .* got crash@rank=2,step=1"):
        examine(replace(LAUNCH, faults=(Fault.parse("crash@rank=2,step=1"),)), (2,))
