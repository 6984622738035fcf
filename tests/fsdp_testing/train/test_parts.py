"""Which part of one process's parameters a rank has is known by its values before the first step."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fsdp_testing.train.observation import Observer
from fsdp_testing.train.on_rank import RankReport
from fsdp_testing.train.parts import doubled, with_parts_in_place
from fsdp_testing.train.quantities import Kind, Quantity
from fsdp_testing.train.whole import initial, whole

GRADIENT = Quantity(Kind.GRADIENT, "0.weight")


def model(layers=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(layers)))


def report(module, rows=2):
    observer = Observer()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with observer.watch():
        module(torch.ones(rows, next(module.parameters()).shape[-1])).square().sum().backward()
        optimizer.step()
    observer.finish()
    return RankReport(tuple(observer.steps))


def cut(linear, rows):
    part = nn.Linear(linear.in_features, len(rows))
    part.weight.data = linear.weight.data[rows].clone()
    part.bias.data = linear.bias.data[rows].clone()
    return part


def test_stages_have_the_names_that_their_layers_have_in_one_process():
    alone = whole(1, [report(model())])
    stages = [report(nn.Sequential(*model()[:2])), report(nn.Sequential(*model()[2:]))]
    run = with_parts_in_place(alone, whole(2, stages))
    assert [{*names} == {f"{layer}.{name}" for layer in (0, 1) for name in NAMES} for names in run.parts] == [
        True,
        True,
    ]
    assert {place.name for place in run.parts[1].values()} == {f"{layer}.{name}" for layer in (2, 3) for name in NAMES}
    assert {*initial(run)} == {*initial(alone)}
    assert not run.disagreements
    assert "optimizer state momentum_buffer of 3.1.weight" in map(str, run.quantities)


NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


def test_slices_lie_where_their_values_are_in_any_order_and_zeros_beside_them():
    torch.manual_seed(0)
    linear = nn.Linear(3, 6)
    linear.bias.data.zero_()
    alone = whole(1, [report(nn.Sequential(copy.deepcopy(linear)))])
    ranks = [report(nn.Sequential(cut(linear, rows))) for rows in ([0, 2, 4], [1, 3, 5])]
    run = with_parts_in_place(alone, whole(2, ranks))
    assert run.parts[1]["0.weight"].index == run.parts[1]["0.bias"].index == (1, 3, 5)
    assert torch.equal(initial(run)[Quantity(Kind.PARAMETER, "0.weight")][0], linear.weight)
    assert torch.equal(run.quantities[GRADIENT][0], alone.quantities[GRADIENT][0])


def test_parts_that_are_not_known_leave_the_run_as_it_is():
    alone = whole(1, [report(nn.Sequential(nn.Linear(3, 6)))])
    run = whole(2, [report(nn.Sequential(nn.Linear(3, 3))), report(nn.Sequential(nn.Linear(3, 3)))])
    assert with_parts_in_place(alone, run) is run
    twins = nn.Sequential(*(copy.deepcopy(model(1)[0]) for _ in range(2)))
    alone = whole(1, [report(copy.deepcopy(twins))])
    run = whole(2, [report(nn.Sequential(layer)) for layer in twins])
    # Nobody knows which of two equal layers a stage has: not all are there, and the run is not compared.
    assert {str(key).partition(".")[0] for key in initial(with_parts_in_place(alone, run))} == {"parameter 0"}


def test_ranks_double_the_work_of_one_where_part_and_rows_are_the_same():
    same = whole(2, [report(model()), report(model())])
    assert doubled(same) == 2
    assert doubled(whole(2, [report(model()), report(model(), rows=3)])) == 1
    alone = whole(1, [report(model())])
    stages = whole(2, [report(nn.Sequential(*model()[:2])), report(nn.Sequential(*model()[2:]))])
    assert doubled(with_parts_in_place(alone, stages)) == 1
