"""FSDP2: a custom gradient divide factor raises over gloo."""

from ranks import data, error_of, fsdp2, mlp, show


def defect(rank):
    model = fsdp2(mlp())
    model.set_gradient_divide_factor(3.0)
    return error_of(model(data(rank)).sum().backward)


show(defect)
