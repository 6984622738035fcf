"""FSDP1: `sync_module_states=True` is refused for a model that computes on the CPU."""

from ranks import error_of, fsdp1, mlp, show


def defect(rank):
    return error_of(fsdp1, mlp(), sync_module_states=True)


show(defect)
