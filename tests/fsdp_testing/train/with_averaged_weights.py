"""Each rank has a gradient of its own at the step: weights are averaged every so many steps, or the step itself reduces."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--period", type=int, default=1)
parser.add_argument("--optimizer", default="SGD")
parser.add_argument("--mistake", default="")
options = parser.parse_args()


class ByHand(torch.optim.Optimizer):
    """Adam's update, with gradients that are reduced in the step."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            square = parameter.grad.square()
            for value in (parameter.grad, square):
                dist.all_reduce(value)
                value /= dist.get_world_size()
            square = square if options.mistake == "own moments" else parameter.grad.square()
            parameter -= self.param_groups[0]["lr"] * parameter.grad / (square.sqrt() + 0.1)


torch.set_default_dtype(torch.float64)
dist.init_process_group()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
more = {"momentum": 0.9} if options.optimizer == "SGD" else {}
optimizer = (ByHand if options.optimizer == "ByHand" else getattr(torch.optim, options.optimizer))(
    model.parameters(), lr=0.05, **more
)
data = TensorDataset(torch.randn(60, 6), torch.randn(60, 1))
sampler = DistributedSampler(data, shuffle=False)
kept = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
outer = torch.optim.SGD(kept, lr=0.7)
for step, (inputs, targets) in enumerate(DataLoader(data, batch_size=12 // dist.get_world_size(), sampler=sampler)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    if options.mistake == "slightly" and dist.get_world_size() > 1:
        model[0].weight.grad *= 1.01
    optimizer.step()
    averaged = options.optimizer != "ByHand" and (step + 1) % options.period == 0
    if averaged and options.mistake == "outer":
        for old, parameter in zip(kept, model.parameters()):
            old.grad = old.detach() - parameter.detach()
            dist.all_reduce(old.grad)
            old.grad /= dist.get_world_size()
        outer.step()
        for old, parameter in zip(kept, model.parameters()):
            parameter.data.copy_(old)
        continue
    for parameter in model.parameters() if averaged else ():
        if options.mistake == "broadcast":
            dist.broadcast(parameter.data, 0)
        else:
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size() if options.mistake != "summed" else 1
dist.destroy_process_group()
