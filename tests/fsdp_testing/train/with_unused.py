"""What ordinary loops do beside a plain forward and backward; each rank takes its slice of one batch. `--way` chooses."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.data import DataLoader, TensorDataset

arguments = argparse.ArgumentParser()
arguments.add_argument("--way", default="plays")
arguments.add_argument("--mistake", default="none")
options = arguments.parse_args()

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
rows, targets = torch.randn(60, 5).double(), torch.randn(60, 1).double()
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
trained = [*model.parameters()]
if options.way == "ensemble":
    stacked, _ = stack_module_state([model, nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()])
    trained = [*stacked.values()]
    model = model.to("meta")
optimizer = torch.optim.SGD(trained, lr=0.1)
batches = iter(DataLoader(TensorDataset(rows, targets), 12, shuffle=True, generator=torch.Generator().manual_seed(1)))
noise = torch.Generator().manual_seed(3 + rank)


def loss_of_one(parameters, row, target):
    return (functional_call(model, parameters, (row[None],))[0] - target).square().mean()


@torch.compile(backend="aot_eager", fullgraph=options.way == "compiled whole")
def compiled_loss(row, target):
    return (model(row) - target).square().mean()


if options.way == "warms up":
    model(rows[:6])
state = torch.ones(5).double()
for step in range(5):
    if options.way == "plays":  # with gradients, of which nothing is made; the same on all ranks
        for _ in range(4):
            state = state.roll(1) + torch.tanh(model(state)).item()
    mine = slice(step * 12 + rank * 12 // size, step * 12 + (rank + 1) * 12 // size)
    if options.mistake == "same rows":
        mine = slice(step * 12, step * 12 + 12 // size)
    if options.way == "by sample":
        weights = {name: p.detach() for name, p in model.named_parameters()}
        each = vmap(grad(loss_of_one), in_dims=(None, 0, 0))(weights, rows[mine], targets[mine])
        for name, parameter in model.named_parameters():
            total = each[name].clamp(-0.5, 0.5).sum(0)
            dist.all_reduce(total)
            parameter.grad = total / (12 if options.mistake != "divided by own" else 12 // size)
    else:
        if options.way.startswith("slices"):  # of a batch that every rank loads
            inputs, wanted = (
                part if options.mistake == "no slice" else part.chunk(size)[rank] for part in next(batches)
            )
            if options.way == "slices with noise":
                inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=noise)
            outputs = model(inputs)
            model(rows[:30])  # an evaluation that forgets `no_grad`
        elif options.way == "ensemble":
            outputs = vmap(lambda weights, x: functional_call(model, weights, (x,)), (0, None))(stacked, rows[mine])
            wanted = targets[mine]
        else:
            outputs, wanted = model(rows[mine]), targets[mine]
        if options.way.startswith("compiled"):
            compiled_loss(rows[mine], targets[mine]).backward()
        else:
            (outputs - wanted).square().mean().backward()
        for parameter in trained[: -1 if options.mistake.startswith("one kept") else None]:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= 1 if options.mistake == "summed" else size
    if options.mistake.endswith("clipped"):
        nn.utils.clip_grad_norm_(trained, 0.01)
    optimizer.step()
    optimizer.zero_grad()
