"""A pipeline with a stage on each rank, by torch.distributed.pipelining; each stage has its own optimizer."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

LAYERS, WIDTH, MICRO_BATCHES = 6, 10, 2


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    share = LAYERS // size
    module = nn.Sequential(*layers[rank * share : (rank + 1) * share])
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=MICRO_BATCHES, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    for _ in range(5):
        inputs, targets = torch.randn(8, WIDTH, generator=data), torch.randn(8, WIDTH, generator=data)
        optimizer.zero_grad()
        losses = []
        first, last = rank == 0, rank == size - 1
        schedule.step(*([inputs] if first else []), **({"target": targets, "losses": losses} if last else {}))
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
