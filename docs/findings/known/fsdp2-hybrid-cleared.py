"""FSDP2: `zero_grad` keeps partly reduced gradients of micro-batches without all-reduce."""

from ranks import data, fsdp2, full, hybrid, mean, mlp, off, show


def defect(rank):
    plain, model = mlp(1), fsdp2(mlp(1), mesh=hybrid(2, 1))
    model.set_requires_all_reduce(False)
    model(data(rank)).sum().backward()
    model.zero_grad()
    model.set_requires_all_reduce(True)
    for one in (model, plain):
        one(data(rank, 1)).sum().backward()
    return off("the weight's gradient", full(model[0].weight.grad), mean(plain[0].weight.grad))


show(defect)
