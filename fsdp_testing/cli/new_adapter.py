"""`fsdp-verify new-adapter NAME`: the skeleton of an adapter, for an implementation of your own."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from fsdp_testing.cli.options import Command, Subparsers, declare, path_of
from fsdp_testing.errors import InvalidArgument

DESCRIPTION = """\
Write the skeleton of an adapter for an implementation that keeps a flat shard on each rank: you fill in two functions, and the
arithmetic of spans is done. An existing file is never overwritten.
"""
SKELETON = '''\
"""How fsdp-verify sees @NAME@: fill in `wrap` and `layout`, then `fsdp-verify run @MODULE@:IMPLEMENTATION`."""

import math

from fsdp_testing.adapters.adapter import TorchStyle
from fsdp_testing.adapters.protocol import Piece


def wrap(module, setup):
    """The module, wrapped on the ranks of `setup.group` without changing a value."""
    raise NotImplementedError("return the module wrapped by @NAME@")


def layout(model):
    """This rank's flat parameter, its first element in the whole, and name, shape, first element of each original."""
    raise NotImplementedError("return flat, first, [(name, shape, start), ...]")


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
    name="@NAME@",
    wrap=wrap,
    named_parameters=lambda model: [("flat", layout(model)[0])],
    named_buffers=lambda model: model.module.named_buffers(),
    local_pieces=local_pieces,
    optimizer_pieces=optimizer_pieces,
    # Claim what it promises (`fsdp-verify list capabilities`): what is claimed is judged.
    capabilities=frozenset({"full_shard", "optimizer_pieces"}),
)
'''
EXAMPLE = "fsdp-verify new-adapter acme\nfsdp-verify run acme_adapter:IMPLEMENTATION"


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(commands, "new-adapter", "write the skeleton of an adapter", DESCRIPTION, example=EXAMPLE)
    command.add_argument("name", metavar="NAME", help="name of the implementation")
    command.add_argument("file", metavar="FILE", nargs="?", type=path_of, help="default NAME_adapter.py")
    return command


def execute(options: argparse.Namespace) -> int:
    """Write the file and say what to do with it."""
    from fsdp_testing.report.files import write_atomically

    if not re.fullmatch(r"\w[\w.+-]*", options.name):
        raise InvalidArgument(
            f"new-adapter: expected a name of letters, digits and ._+-, got {options.name!r}. Give another."
        )
    path = options.file or Path(re.sub(r"\W", "_", options.name) + "_adapter.py")
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise InvalidArgument(f"new-adapter: expected a file that can be imported, got {str(path)!r}. Name it x.py.")
    if path.exists():
        raise InvalidArgument(f"new-adapter: expected no file at {str(path)!r}, got one. Remove it, or name another.")
    write_atomically(path, SKELETON.replace("@NAME@", options.name).replace("@MODULE@", path.stem), "new-adapter")
    print(f"written: {path}; fill in wrap and layout, then run: fsdp-verify run {path.stem}:IMPLEMENTATION")
    return 0
