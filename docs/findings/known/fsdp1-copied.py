"""FSDP1: `copy.deepcopy` of a wrapped model raises, for example for a moving average of its weights."""

import copy

from ranks import error_of, fsdp1, mlp, show


def defect(rank):
    return error_of(copy.deepcopy, fsdp1(mlp()))


show(defect)
