"""What scripts are made of works before it is copied: ranks agree with one process, and what differs is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_testing import run_ranks
from fsdp_testing.cases.models.model import tensors_in
from fsdp_testing.checks.findings.script_parts import ddp
from fsdp_testing.checks.findings.script_parts.side_by_side import OneProcess, Task, clean, close, differences
from fsdp_testing.checks.findings.script_parts.wire import CALLS, Wire


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, use: Any = ()) -> torch.Tensor:
        return self.a(x)


def build() -> nn.Module:
    model = Layer()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return model


def wrap(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def training(one: Any) -> Any:
    yield "0 forward_backward", one.forward_backward(1, (4, 2), (), 1.0)
    yield "1 clip", one.clip(0.5, 2.0)
    one.optimizer.step()
    one.edit(("a.bias",), 2.0, True)
    yield "4 forward", one.only_forward(2, (4,), (), 1.0, "eval")
    yield "the end", []


class Wrong(ddp.Access):
    """Clips to half of what was asked."""

    @staticmethod
    def clip(model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm / 2, norm_type)


def task(**changes: Any) -> Task:
    made = Task(2, 1, 3, torch.float64, build, wrap, ddp.Access, sgd, True, training, 1e-9, True)
    return made._replace(**changes)


def found_on_ranks(**changes: Any) -> list[str]:
    return list(differences(task(**changes), dist.get_rank()))


def test_a_right_implementation_agrees_with_one_process():
    assert run_ranks(found_on_ranks, size=2) == [[], []]


def test_what_differs_is_named_with_its_rank_and_operation():
    first, second = run_ranks(found_on_ranks, size=2, access=Wrong)
    assert first[0].startswith("rank 0, 4 forward: ")
    assert second[0].startswith("rank 1, 4 forward: ")
    assert any("parameter a.weight is off by" in expected for expected in first)
    assert any("gradient of a.weight is off by" in expected for expected in first)


def test_what_is_measured_counts_beyond_its_limit_on_ranks_alone():
    assert OneProcess(task()).beyond(0, lambda: 7)[0].item() == 0.0
    assert run_ranks(beyond, size=1) == [[5.0, 0.0]]


def beyond() -> list[float]:
    from fsdp_testing.checks.findings.script_parts.side_by_side import Ranks

    ranks = Ranks(task(size=1), 0)
    return [ranks.beyond(limit, lambda: 7)[0].item() for limit in (2, 9)]


def sent() -> dict[str, list[int]]:
    wire = Wire().watch()
    dist.all_reduce(torch.zeros(64))
    dist.all_reduce(torch.zeros(1))
    dist.all_gather_into_tensor(torch.zeros(64), torch.zeros(64 // dist.get_world_size()))
    return wire.sent


def test_what_goes_on_the_wire_is_counted_and_flags_are_not():
    for counted in run_ranks(sent, size=2, isolation="fresh"):
        assert counted == {"gathers": [256], "reductions": [256]}
    assert all(hasattr(dist.ProcessGroup, name) for name in ("_allgather_base", "allreduce"))
    assert {kind for _, kind, _ in CALLS} == {"gathers", "reductions"}


@pytest.mark.parametrize(
    ("value", "count"),
    [(torch.zeros(1), 1), (torch.zeros(1, dtype=torch.int64), 0), ({"a": [torch.zeros(1)]}, 1), ("x", 0)],
)
def test_outputs_are_looked_into(value: object, count: int):
    assert len(tensors_in(value)) == count


def test_names_and_numbers():
    assert clean("_fsdp_wrapped_module.a._fsdp_wrapped_module.weight") == "a.weight"
    assert close(torch.ones(2), torch.ones(2), 0.0)
    assert not close(torch.ones(2), torch.ones(3), 1.0)
    assert not close(torch.tensor([torch.nan]), torch.ones(1), 1.0)
