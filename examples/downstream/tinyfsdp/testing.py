"""How fsdp-verify sees tinyfsdp: what `fsdp-verify new-adapter tinyfsdp` wrote, filled in."""

import math

from fsdp_testing.adapters.adapter import TorchStyle
from fsdp_testing.adapters.protocol import Piece
from tinyfsdp import TinyFSDP


def wrap(module, setup):
    """The module, wrapped on the ranks of `setup.group` without changing a value."""
    return TinyFSDP(module, setup.group)


def layout(model):
    """This rank's flat parameter, its first element in the whole, and name, shape, first element of each original."""
    return model.flat, model.rank * len(model.flat), model.originals


def pieces(model, values, grads=None):
    """What this rank has of each original: views of `values` and `grads`, which are laid out as the flat parameter is."""
    found, (flat, first, originals) = {}, layout(model)
    for name, shape, start in originals:
        # In elements of the whole; an empty span where this rank has nothing of it. Padding belongs to no parameter.
        stop = start + math.prod(shape)
        low = min(max(start, first), stop)
        high = max(min(stop, first + len(flat)), low)
        here = slice(low - first, high - first) if low < high else slice(0, 0)
        grad = None if grads is None else grads[here]
        found[name] = (Piece(tuple(shape), low - start, high - start, values[here], grad),)
    return found


def local_pieces(model):
    """Parameters and gradients; only observe here: no collective, no gathering."""
    flat, _, _ = layout(model)
    return pieces(model, flat.detach(), flat.grad)


def optimizer_pieces(model, optimizer):
    """The optimizer's state of each original: numbers such as Adam's step, and what is laid out as the flat parameter is."""
    found, (flat, _, originals) = {}, layout(model)
    for key, value in optimizer.state.get(flat, {}).items():
        if value is not None and value.shape == flat.shape:
            held = pieces(model, value)
        else:
            held = {name: float(value) for name, _, _ in originals if value is not None}
        for name, entry in held.items():
            found.setdefault(name, {})[key] = entry
    return found


IMPLEMENTATION = TorchStyle(
    name="tinyfsdp",
    wrap=wrap,
    named_parameters=lambda model: [("flat", layout(model)[0])],
    named_buffers=lambda model: model.module.named_buffers(),
    local_pieces=local_pieces,
    optimizer_pieces=optimizer_pieces,
    # Claim what it promises (`fsdp-verify list capabilities`): what is claimed is judged.
    capabilities=frozenset({"full_shard", "optimizer_pieces", "accumulate_without_no_sync", "uneven_parameters"}),
)
