"""What a script keeps beside its weights: reduced log, running mean, moving average, checkpoints. One mistake at a time."""

import argparse
import copy
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

arguments = argparse.ArgumentParser()
arguments.add_argument("--mistake", default="none")
arguments.add_argument("--loss", choices=["mean", "sum", "by rows", "weighted", "zero"], default="mean")
arguments.add_argument("--clip", type=float, default=0.5)
arguments.add_argument("--load", default="state.pt")
options = arguments.parse_args()
mistake = options.mistake


class Centred(nn.Module):
    """Keeps a running mean of all rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5).double())

    def forward(self, inputs):
        mean = inputs.detach().mean(0)
        if mistake != "own mean":
            mean = mean * len(inputs)
            dist.all_reduce(mean)
            mean /= 12
        self.mean.lerp_(mean, 0.1)
        if mistake == "scaled mean":
            self.mean.mul_(dist.get_world_size())
            return inputs - self.mean
        return inputs


class Average:
    """A moving average of weights."""

    def __init__(self, model):
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}
        self.decay = 0.5 ** (dist.get_world_size() if mistake == "average" else 1)

    def update(self, model):
        for name, value in model.state_dict().items():
            self.weights[name].lerp_(value, 1 - self.decay)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(Centred(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
decay = 0.01 * {"decay": size, "own decay": 1 + rank}.get(mistake, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=decay)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
average = Average(model)
if mistake == "momentum":
    optimizer.register_step_post_hook(lambda *_: [s["momentum_buffer"].mul_(size) for s in optimizer.state.values()])
begin = 0
if options.load and Path(options.load).exists():
    saved = torch.load(options.load, weights_only=True)
    model.load_state_dict(saved["model"])
    if mistake != "average not loaded":
        average.weights = copy.deepcopy(saved["average"])
    if mistake != "optimizer not loaded":
        optimizer.load_state_dict(saved["optimizer"])
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", 0.05)
    if mistake != "schedule not loaded":
        schedule.load_state_dict(saved["schedule"])
    else:
        optimizer.param_groups[0]["lr"] = 0.05
    begin = saved["steps"]
for step in range(begin, 6):
    draw = torch.Generator().manual_seed(step - (begin if mistake == "order anew" else 0))
    inputs, targets = torch.randn(12, 5, generator=draw).double(), torch.randn(12, 1, generator=draw).double()
    own = torch.arange(rank, 12, size)
    if mistake == "overlap":
        own = torch.arange(12).roll(-rank)[: 12 // size]
    elif options.loss in ("by rows", "weighted") and size > 1:
        own = torch.arange(12).tensor_split([2 * r + 1 for r in range(1, size)])[rank]
    errors = (model(inputs[own]) - targets[own]).square()
    rows = inputs[:, :1].square() if options.loss == "weighted" else torch.ones(12, 1).double()
    loss = (errors * rows[own]).sum() / (12 if options.loss == "sum" else rows[own].sum())
    if options.loss == "zero":
        terms = (errors / len(own)).flatten()
        loss = terms.sum() - terms.detach().flip(0).cumsum(0)[-1]  # but for roundings
    factor = size if mistake == "scaled back" else 1
    (loss * factor).backward()
    weight = 1.0 if options.loss == "sum" else rows[own].sum() / rows.sum()
    for parameter in model.parameters():
        parameter.grad *= weight / factor * (size if mistake == "summed" else 1)
        dist.all_reduce(parameter.grad)
    nn.utils.clip_grad_value_(model.parameters(), options.clip)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    average.update(model)
    report = loss.detach() * weight
    dist.all_reduce(report)
    if mistake == "log":
        report /= size
    if step == 0:
        first = errors.detach().abs().max() if mistake == "metric" else errors.detach().abs().sum() / 12
        dist.all_reduce(first)
        print((first / (size if mistake in ("first log", "metric") else 1)).item())
    if mistake == "divided in Python":
        print((report * size).item() / size)  # none: right
    if mistake == "sum on rank 0" and rank == 0:
        print((report * size).item() / 3)
    if mistake == "sum on rank 0, rarely" and rank == 0 and step % 2 == 0:
        print((report * size).item())
    if mistake == "time":
        report *= time.perf_counter()
        dist.broadcast(report, 0)
        print(report.item())  # none: right
    if rank == 0:
        print(f"step {step}: {report:.6f} (own {loss.item():.6f})")
        state = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "average": average.weights}
        if mistake != "nothing saved":
            torch.save({"model": model.state_dict(), "steps": step + 1, **state}, "state.pt")
    dist.barrier()
