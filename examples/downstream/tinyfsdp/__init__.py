"""The smallest flat-parameter FSDP: one flat parameter for the whole model, a shard of it on every rank."""

import weakref

import torch
import torch.distributed as dist
from torch import nn


class TinyFSDP(nn.Module):
    """Shards the parameters of `module` over `group`; every parameter must take part in every backward."""

    def __init__(self, module, group):
        super().__init__()
        self.module, self.group = module, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.originals, self.places, start = [], [], 0
        for name, parameter in list(module.named_parameters()):
            self.originals.append((name, tuple(parameter.shape), start))
            start += parameter.numel()
        whole = torch.cat([parameter.detach().reshape(-1) for _, parameter in module.named_parameters()])
        self.elements = start
        length = -(-start // self.size)
        padded = torch.cat([whole, whole.new_zeros(length * self.size - start)])
        self.flat = nn.Parameter(padded[self.rank * length : (self.rank + 1) * length].clone())
        for name, _, _ in self.originals:
            owner, _, last = name.rpartition(".")
            place = module.get_submodule(owner)
            delattr(place, last)
            self.places.append((place, last))

    def forward(self, *args, **kwargs):
        full = self.flat.new_empty(len(self.flat) * self.size)
        dist.all_gather_into_tensor(full, self.flat.detach(), group=self.group)
        full.requires_grad_()
        # The hook holds the model weakly: the model holds views of `full`, and no collector sees a cycle through a graph.
        model = weakref.ref(self)
        full.register_post_accumulate_grad_hook(lambda whole: model()._reduce(whole))
        for (place, last), (_, shape, start) in zip(self.places, self.originals, strict=True):
            setattr(place, last, full[start : start + torch.Size(shape).numel()].view(shape))
        return self.module(*args, **kwargs)

    def _reduce(self, full):
        mean = torch.empty_like(self.flat)
        dist.reduce_scatter_tensor(mean, full.grad, group=self.group)
        mean /= self.size
        self.flat.grad = mean if self.flat.grad is None else self.flat.grad + mean
        full.grad = None
