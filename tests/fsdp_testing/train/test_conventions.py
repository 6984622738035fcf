"""Statistics of a rank's own rows: a loop that has them fails, is told which reference explains it, and is accepted by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_testing import check_training
from fsdp_testing.train.function import TrainingDiffers

HOLDS = "rows of all ranks: differs; one process that runs the rows of each rank separately, and averages: the same"


class Contrasted(nn.Module):
    """Its loss is larger the more alike the rows are that it is given."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 4)

    def forward(self, inputs):
        outputs = self.inner(inputs)
        return (outputs @ outputs.T).logsumexp(-1).mean()


class Annealed(Contrasted):
    """What it returns grows with each forward, by a number, a buffer and a tensor that it keeps."""

    def __init__(self):
        super().__init__()
        self.forwards, self.last = [0], torch.zeros(())
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        self.forwards[0] += 1
        self.seen += 1
        self.last = self.last + 1
        return super().forward(inputs) * (self.forwards[0] + self.seen.clone() + self.last)


def trains(world, make, loss_of):
    torch.manual_seed(0)
    plain = make().double()
    model = DistributedDataParallel(plain) if world.size > 1 else plain
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(step)).double()[world.rank :: world.size]
        optimizer.zero_grad()
        loss_of(model(inputs)).backward()
        optimizer.step()
    return {}


def normalises_by_rank(world):
    return trains(
        world, lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), lambda out: (out - 1).square().mean()
    )


def contrasts_by_rank(world):
    return trains(world, Contrasted, lambda loss: loss)


def anneals_and_contrasts_by_rank(world):
    return trains(world, Annealed, lambda loss: loss)


def contrasts_and_scales_by_rank(world):
    return trains(world, Contrasted, lambda loss: loss * world.size)


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (normalises_by_rank, "batch-norm-per-rank"),
        (contrasts_by_rank, "loss-per-rank"),
        (anneals_and_contrasts_by_rank, "loss-per-rank"),
    ],
)
def test_a_statistic_of_each_rank_is_explained_by_the_second_reference_and_accepted(loop, name):
    with pytest.raises(TrainingDiffers, match="each rank's own statistic, by design or by mistake") as caught:
        check_training(loop, world_sizes=(1, 2))
    assert HOLDS in str(caught.value)
    assert f'In Python: accept=["{name}"]' in str(caught.value)
    check_training(loop, world_sizes=(1, 2), accept=[name])


def test_what_is_scaled_beside_it_is_not_explained_and_fails_though_accepted():
    with pytest.raises(TrainingDiffers, match="averages: differs, too"):
        check_training(contrasts_and_scales_by_rank, world_sizes=(1, 2))
    with pytest.raises(TrainingDiffers):
        check_training(contrasts_and_scales_by_rank, world_sizes=(1, 2), accept=["loss-per-rank"])
