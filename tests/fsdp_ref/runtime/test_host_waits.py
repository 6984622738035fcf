"""No value of a tensor is read, and nothing is made of Python numbers, where a host would have to wait for its device.

On a CPU reading costs nothing, so a read that is added would show on no test machine. What an accelerator does is
switched on (``reads_late``), and every way to read a value is forbidden between forward and the optimizer's step.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_ref.annotations import unit_of
from fsdp_ref.comm.streams import Later
from fsdp_ref.fence.wire_order import RankComparison
from fsdp_ref.runtime.root import lazy_init
from fsdp_ref.training.clip import clip_grad_norm_

READS = {
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "equal",
    "allclose",
    "nonzero",
    "cpu",
}
COPIES = {"tensor", "as_tensor", "from_numpy"}


class NoReads(TorchFunctionMode):
    """Refuses what reads a value into Python, and what copies Python values to a device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        pinned = "pin_memory" in (kwargs or {})  # memory that the device reads by itself
        assert name not in READS | COPIES or pinned, f"{name} is called between forward and step"
        return func(*args, **(kwargs or {}))


class NoReadsBelow(TorchDispatchMode):
    """The same for operations that composite ones are made of."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        bad = ("_local_scalar_dense", "aten.equal", "aten.nonzero", "aten.is_nonzero", "aten.masked_select")
        assert not name.startswith(tuple("aten." * (not each.startswith("aten")) + each for each in bad)), name
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_reads():
    with NoReads(), NoReadsBelow():
        yield


class Frozen(nn.Module):
    """Parts that are frozen, as in most fine-tuning."""

    def __init__(self):
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.mid.weight.requires_grad_(False)
        self.mid.bias.requires_grad_(False)
        self.out.bias.requires_grad_(False)

    def forward(self, x):
        return self.out(self.mid(self.inp(x).tanh()))


@pytest.mark.world(2)
@pytest.mark.parametrize("kind", ["trained", "frozen", "edits"])
def test_a_step_reads_no_value(world, trial, api, strategy, kind, monkeypatch):
    if kind == "frozen" and api == "flat":
        pytest.skip("a flat parameter is trained or frozen as a whole")
    t = trial(api, strategy, **({"model": Frozen} if kind == "frozen" else {}))
    if kind == "edits":

        def clip(module, args):
            with torch.no_grad():
                for param in module._parameters.values():
                    param.clamp_(-0.2, 0.2)

        for module in t.model.modules():
            if type(module) is nn.Linear:
                module.register_forward_pre_hook(clip)
    root = lazy_init(unit_of(t.model))
    next(guard for guard in root.guards.members if isinstance(guard, RankComparison)).reads_late = True
    unit = unit_of(t.model)
    reads = []

    def values(later):
        """The one read: of what was copied to the host since the last backward, before the next forward begins."""
        assert root.calls[0].unit.life.state.name != "FORWARD"
        reads.append(len(root.calls))
        with torch._C.DisableTorchFunction():
            return later._tensor.tolist()

    monkeypatch.setattr(Later, "values", values)
    for step in range(3):
        with torch.no_grad():
            xs = t.inputs(step)
        with no_reads() if step else contextlib.nullcontext():
            t.loss(xs).backward()
            clip_grad_norm_(unit.holder, 1.0)
    assert reads == [1, 1]
    t.optimizer.step()


def test_the_guard_notices():
    with no_reads():
        x = torch.ones(2)
        for read in (lambda: x.sum().item(), x.tolist, lambda: bool(x[0]), lambda: torch.tensor([1.0]), x.nonzero):
            with pytest.raises(AssertionError):
                read()
