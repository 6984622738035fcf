"""FSDP2: `register_hook` of a parameter is never called."""

from ranks import data, fsdp2, mlp, show


def defect(rank):
    model = fsdp2(mlp())
    called = []
    for parameter in model.parameters():
        parameter.register_hook(called.append)
    model(data(rank)).sum().backward()
    return "" if called else "no hook was called"


show(defect)
