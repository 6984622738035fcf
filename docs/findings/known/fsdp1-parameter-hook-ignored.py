"""FSDP1 with original parameters: `register_hook` of a parameter is never called."""

from ranks import data, fsdp1, mlp, show


def defect(rank):
    model = fsdp1(mlp())
    called = []
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.numel():
            parameter.register_hook(called.append)
    model(data(rank)).sum().backward()
    return "" if called else "no hook was called"


show(defect)
