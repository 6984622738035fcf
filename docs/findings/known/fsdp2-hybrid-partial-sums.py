"""FSDP2, hybrid: micro-batches without all-reduce add up in `reduce_dtype`, though gradients are float32."""

import torch
from ranks import fsdp2, full, hybrid, mlp, show
from torch.distributed.fsdp import MixedPrecisionPolicy


def defect(rank):
    low = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.bfloat16)
    model = fsdp2(mlp(1), mesh=hybrid(2, 1), mp_policy=low)
    for place in range(9):
        # 1 and then eight times 2^-8, each of them exact in bfloat16; so is the sum, 1 + 2^-5.
        model.set_requires_all_reduce(place == 8)
        model(torch.full((1, 4), 1.0 if place == 0 else 2.0**-8)).sum().backward()
    found = full(model[0].weight.grad)[0, 0].item()
    return "" if found == 1 + 2**-5 else f"the gradient is {found}, expected {1 + 2**-5}"


show(defect)
