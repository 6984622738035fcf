"""Micro-batches that share one `no_sync` all count: in the oracle, on every implementation, and the check can fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from fuzz_cases import case
from toy import Toy, ToyAdapter

from fsdp_testing.cases.operations import Batch, ForwardBackward, LocalMicroBatches, Observe, Step
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.oracle.replay import Replay
from fsdp_testing.ranks.pool import default_pool

BATCHES = Batch(1), Batch(2, (3,))
APART = tuple(ForwardBackward(batch, no_sync=True) for batch in BATCHES)
END = ForwardBackward(Batch(3)), Observe(), Step()


class OnlyTheFirst(Toy):
    """Of several micro-batches inside one `no_sync` the first alone counts."""

    done = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.done = 0
        with super().no_sync():
            yield

    def finish_backward(self) -> None:
        for parameter in self.full.values() if self.done and not self.synchronize else ():
            parameter.grad = None
        super().finish_backward()
        self.done += 1


ONLY_THE_FIRST = ToyAdapter(OnlyTheFirst)


def test_one_process_gives_what_it_gives_for_them_apart():
    together, apart = Replay(case(LocalMicroBatches(BATCHES), *END)), Replay(case(*APART, *END))
    one, other = together.run()[-1], apart.run()[-1]
    assert all(
        value is None or torch.equal(value, other.values[quantity])
        for quantity, value in one.values.items()
        if quantity.kind != "result"
    )


@pytest.mark.parametrize("name", ["toy:UNBROKEN", "torch-ddp", "torch-fsdp2", "fsdp_ref-composable"])
def test_healthy_implementations_pass(name: str):
    strategy = "no_shard" if name == "torch-ddp" else "full_shard"
    cases = [case(LocalMicroBatches(BATCHES), *END, strategy=strategy)]
    found = CaseRunner(default_pool()).judge_batch(name, cases, Watch())
    assert [result.verdict.value for result in found] == ["pass"], found[0].judgement.why


def test_a_fault_that_separate_contexts_hide_is_seen():
    cases = [case(*APART, *END), case(LocalMicroBatches(BATCHES), *END)]
    found = CaseRunner(default_pool()).judge_batch("test_local_micro_batches:ONLY_THE_FIRST", cases, Watch())
    assert [result.verdict.value for result in found] == ["pass", "fail"]
    assert found[1].signature is not None
    assert found[1].signature.kind == "diverged"
