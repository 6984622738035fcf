"""FSDP1: a wrapped model cannot be pickled and read again."""

import pickle

from ranks import error_of, fsdp1, mlp, show


def defect(rank):
    model = fsdp1(mlp())
    return error_of(lambda: pickle.loads(pickle.dumps(model)))


show(defect)
