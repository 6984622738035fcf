"""`fsdp-verify plan`: how is a model sharded over any number of ranks? Drawn without processes and without memory."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fsdp_testing.cli.options import Command, Subparsers, count, declare
from fsdp_testing.errors import InvalidArgument

if TYPE_CHECKING:
    from fsdp_testing.cli.unit_layouts import UnitLayout
    from fsdp_testing.report.terminal import Output

RANKS_DRAWN = 16
BAR_WIDTH = 48
DTYPES = ("float32", "float64", "float16", "bfloat16")


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(
        commands,
        "plan",
        "shard layout of a model at any world size",
        "Draw which rank holds which elements of which parameter, with alignment gaps and padding.",
    )
    command.add_argument(
        "model", metavar="MODEL", help="a model of `list models`, or package.module:factory (built on the meta device)"
    )
    command.add_argument(
        "--world-size", type=count, default=2, metavar="N", help="ranks in the shard group (default 2)"
    )
    command.add_argument(
        "--unit",
        action="append",
        default=[],
        metavar="PATTERN",
        help="submodules that become units: FQN pattern or class name; repeatable (default: the model's own)",
    )
    command.add_argument("--dtype", choices=DTYPES, default="float32", help="of models of `list models`")
    command.add_argument("--rank", type=int, metavar="R", help="show the pieces that this rank holds")
    command.add_argument("--packed", action="store_true", help="no gaps between parameters, no padding of the total")
    return command


def execute(options: argparse.Namespace) -> int:
    """Print the layout."""
    from fsdp_testing.cli.unit_layouts import unit_layouts
    from fsdp_testing.report.terminal import open_console

    size = options.world_size
    if options.rank is not None and not 0 <= options.rank < size:
        raise InvalidArgument(f"--rank: expected 0 to {size - 1}, got {options.rank}. Ranks count from 0.")
    model, units = _model(options.model, options.dtype)
    found = unit_layouts(model, world_size=size, units=options.unit or units, aligned=not options.packed)
    if not found:
        raise InvalidArgument(
            f"plan: expected a model with parameters, got {options.model!r}. There is nothing to shard."
        )
    console = open_console()
    for unit in found:
        _print_unit(unit, options.rank, console)
    _print_totals(found, console)
    return 0


def _model(name: str, dtype: str) -> tuple[Any, tuple[str, ...]]:
    """Return the module and the units it has by default."""
    import torch

    from fsdp_testing.zoo import MODELS

    if name in MODELS:
        return MODELS[name].build(0, getattr(torch, dtype)), MODELS[name].units
    module_name, separator, path = name.partition(":")
    if not separator:
        known = ", ".join(MODELS)
        raise InvalidArgument(f"plan: expected one of {known} or `package.module:factory`, got {name!r}. Name a model.")
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
        if not isinstance(found, torch.nn.Module):
            with torch.device("meta"):
                found = found()
    except Exception as error:
        raise InvalidArgument(
            f"plan: expected {name} to give a module when called without arguments, got "
            f"{type(error).__name__}: {error}. Correct the factory, or write one."
        ) from error
    if not isinstance(found, torch.nn.Module):
        raise InvalidArgument(
            f"plan: expected {name} to give a torch.nn.Module, got {type(found).__name__}. Return one."
        )
    return found, ()


def _print_unit(unit: UnitLayout, rank: int | None, console: Output) -> None:
    from rich.table import Table
    from rich.text import Text

    from fsdp_testing.report.drawings.svg import bytes_text

    layout, shards = unit.shards.layout, unit.shards
    padding = shards.padded_numel - layout.params_numel
    title = Text.assemble((unit.name or "(root)", "bold"), f" {unit.class_name}: ")
    title.append(f"{layout.params_numel:,} elements of {unit.dtype} in {len(layout)} parameters; ")
    title.append(f"{shards.shard_numel:,} ({bytes_text(shards.shard_numel * unit.element_bytes)}) a rank; ")
    title.append(f"{padding:,} of padding ({_share(padding, shards.padded_numel)})")
    console.print(title, soft_wrap=True)
    rows = _parameter_rows(unit) if rank is None else _piece_rows(unit, rank)
    table = Table(box=None, pad_edge=False, header_style="dim", show_edge=False)
    for header in next(rows):
        table.add_column(Text(header), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # names are text, never markup
    console.print(table)
    if rank is None and shards.world_size <= RANKS_DRAWN and layout.numel:
        for line in _bars(unit):
            console.print(Text(line), no_wrap=True, overflow="crop")
    console.print()


def _parameter_rows(unit: UnitLayout) -> Iterator[tuple[str, ...]]:
    yield "  parameter", "shape", "elements [start, stop)", "ranks"
    for index, param in enumerate(unit.shards.layout.params):
        span, ranks = unit.shards.layout.span(index), unit.shards.owner_ranks(index)
        shape = "x".join(map(str, param.shape)) or "scalar"
        holders = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else "".join(map(str, ranks)) or "none (empty)"
        name = param.fqn + (f" (also {', '.join(param.aliases)})" if param.aliases else "")
        yield f"  {name}", shape, f"[{span.start:,}, {span.stop:,})", holders


def _piece_rows(unit: UnitLayout, rank: int) -> Iterator[tuple[str, ...]]:
    yield "  parameter", "its elements [start, stop)", "place in the shard"
    for piece in unit.shards.param_spans(rank):
        span, begin = piece.span_in_param, piece.offset_in_shard
        name = unit.shards.layout.params[piece.param_index].fqn
        yield f"  {name}", f"[{span.start:,}, {span.stop:,})", f"[{begin:,}, {begin + span.numel:,})"
    if unit.shards.padding(rank):
        tail = unit.shards.shard_span(rank).numel
        yield "  (padding)", "", f"[{tail:,}, {unit.shards.shard_numel:,})"


def _bars(unit: UnitLayout) -> Iterator[str]:
    """Return one line per rank: parameters in turns of two shades, padding and gaps dotted."""
    shards = unit.shards
    width = min(BAR_WIDTH, shards.shard_numel)
    for rank in range(shards.world_size):
        pieces = shards.param_spans(rank)
        marks = []
        for place in range(width):
            # The element in the middle of the place stands for it; a place is never empty since width <= shard_numel.
            element = (2 * place + 1) * shards.shard_numel // (2 * width)
            owner = next((p for p in pieces if 0 <= element - p.offset_in_shard < p.span_in_param.numel), None)
            marks.append("·" if owner is None else "█▒"[owner.param_index % 2])
        yield f"  rank {rank:<3} {''.join(marks)}"


def _print_totals(units: tuple[UnitLayout, ...], console: Output) -> None:
    from fsdp_testing.report.drawings.svg import bytes_text

    elements = sum(unit.shards.layout.params_numel for unit in units)
    shard = sum(unit.shards.shard_numel * unit.element_bytes for unit in units)
    padded = sum(unit.shards.padded_numel for unit in units)
    largest = max(units, key=lambda unit: unit.shards.padded_numel * unit.element_bytes)
    gathered = largest.shards.padded_numel * largest.element_bytes
    console.say(
        f"{len(units)} units, {elements:,} elements on {units[0].shards.world_size:,} ranks: {bytes_text(shard)} of "
        f"parameters a rank, {_share(padded - elements, padded)} padding; largest gather {bytes_text(gathered)} "
        f"({largest.name or '(root)'})"
    )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2g} %" if whole else "0 %"
