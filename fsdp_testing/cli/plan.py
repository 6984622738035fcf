"""`fsdp-verify plan`: how is a model sharded over any number of ranks? Drawn without processes and without memory."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_testing.cli.options import Command, Subparsers, count, declare
from fsdp_testing.errors import InvalidArgument

if TYPE_CHECKING:
    from fsdp_testing.cli.unit_layouts import UnitLayout
    from fsdp_testing.report.terminal import Output

RANKS_DRAWN = 16
BAR_WIDTH = 48
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
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
        "model",
        metavar="MODEL",
        help="a model of `list models`, llama-8b, llama-70b, llama-405b, mixture-8x7b, or package.module:factory (built on "
        "the meta device)",
    )
    command.add_argument(
        "--world-size", type=count, metavar="N", help="number of ranks (default 2, or those of --mesh)"
    )
    command.add_argument(
        "--strategy",
        choices=STRATEGIES,
        metavar="STRATEGY",
        help=f"what is sharded, and when: {', '.join(STRATEGIES)} (default FULL_SHARD; with --mesh HYBRID_SHARD)",
    )
    command.add_argument(
        "--mesh", metavar="RxS", help="R replicas of S ranks that shard among themselves, for the hybrid strategies"
    )
    command.add_argument(
        "--unit",
        action="append",
        default=[],
        metavar="PATTERN",
        help="submodules that become units: FQN pattern or class name; repeatable (default: the model's own)",
    )
    command.add_argument("--dtype", choices=DTYPES, default="float32", help="of models known by name")
    command.add_argument("--rank", type=int, metavar="R", help="show the pieces that this rank holds")
    command.add_argument("--packed", action="store_true", help="no gaps between parameters, no padding of the total")
    return command


def execute(options: argparse.Namespace) -> int:
    """Print the layout."""
    from fsdp_testing.cli.unit_layouts import unit_layouts
    from fsdp_testing.report.terminal import open_console

    ranks = _ranks(options)
    if options.rank is not None and not 0 <= options.rank < ranks.world:
        raise InvalidArgument(f"--rank: expected 0 to {ranks.world - 1}, got {options.rank}. Ranks count from 0.")
    model, units = _model(options.model, options.dtype)
    found = unit_layouts(model, world_size=ranks.shards, units=options.unit or units, aligned=not options.packed)
    if not found:
        raise InvalidArgument(
            f"plan: expected a model with parameters, got {options.model!r}. There is nothing to shard."
        )
    console = open_console()
    alike: dict[UnitLayout, list[str]] = {}
    for unit in found:
        alike.setdefault(replace(unit, name=""), []).append(unit.name)
    for unit, names in alike.items():
        _print_unit(
            replace(unit, name=names[0]), None if options.rank is None else options.rank % ranks.shards, console
        )
        if names[1:]:
            console.say(
                f"  the same: {', '.join(names[1:3])}{f' ... {names[-1]}' * (len(names) > 3)}; {len(names)} in all\n"
            )
    _print_totals(found, ranks, console)
    return 0


@dataclass(frozen=True, slots=True)
class Ranks:
    """How ranks are divided: `shards` consecutive ranks hold one copy of the model, and there are `replicas` copies."""

    strategy: str
    replicas: int
    shards: int

    @property
    def world(self) -> int:
        """All ranks."""
        return self.replicas * self.shards


def _ranks(options: argparse.Namespace) -> Ranks:
    strategy = options.strategy or ("HYBRID_SHARD" if options.mesh else "FULL_SHARD")
    hybrid = strategy.startswith("HYBRID")
    if hybrid != bool(options.mesh):
        raise InvalidArgument(
            f"--mesh: expected RxS with the hybrid strategies and with no other, got {options.mesh or 'none'} with {strategy}. "
            "Pass, say, --strategy HYBRID_SHARD --mesh 2048x8."
        )
    if not hybrid:
        size = options.world_size or 2
        return Ranks(strategy, *((size, 1) if strategy == "NO_SHARD" else (1, size)))
    parts = options.mesh.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise InvalidArgument(
            f"--mesh: expected two numbers of at least 1 such as 2048x8, got {options.mesh!r}. Name replicas, then shards."
        )
    ranks = Ranks(strategy, *map(int, parts))
    if options.world_size not in (None, ranks.world):
        raise InvalidArgument(
            f"--world-size: expected {ranks.world}, the ranks of --mesh {options.mesh}, got {options.world_size}. Leave it out."
        )
    return ranks


def _model(name: str, dtype: str) -> tuple[Any, tuple[str, ...]]:
    """Return the module and the units it has by default."""
    import torch

    from fsdp_testing.cases.models import MODELS
    from fsdp_testing.cli.known_models import DECODERS

    if name in DECODERS:
        return DECODERS[name].build(getattr(torch, dtype)), ("Block",)
    if name in MODELS:
        return MODELS[name].build(0, getattr(torch, dtype)), MODELS[name].units
    module_name, separator, path = name.partition(":")
    if not separator:
        known = ", ".join((*MODELS, *DECODERS))
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


def _print_totals(units: tuple[UnitLayout, ...], ranks: Ranks, console: Output) -> None:
    from fsdp_testing.report.drawings.svg import bytes_text

    elements = sum(unit.shards.layout.params_numel for unit in units)
    shard = sum(unit.shards.shard_numel * unit.element_bytes for unit in units)
    padded = sum(unit.shards.padded_numel for unit in units)
    largest = max(units, key=lambda unit: unit.shards.padded_numel * unit.element_bytes)
    gathered = largest.shards.padded_numel * largest.element_bytes
    console.say(
        f"{len(units)} units, {elements:,} elements on {ranks.world:,} ranks: {bytes_text(shard)} of "
        f"parameters a rank, {_share(padded - elements, padded)} padding; largest gather {bytes_text(gathered)} "
        f"({largest.name or 'root'})"
    )
    whole = bytes_text(sum(unit.shards.padded_numel * unit.element_bytes for unit in units))
    copies = f"{ranks.replicas:,} replicas of {ranks.shards:,} consecutive ranks" if ranks.replicas > 1 else "one copy"
    if ranks.strategy == "NO_SHARD":
        kept = "each rank holds all of it, and gradients are averaged over all ranks"
    elif ranks.strategy in {"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"}:
        kept = f"gathered units stay until their backward: up to {whole} a rank"
    else:
        kept = "gathered units are freed after their forward and gathered again for their backward"
    console.say(f"{ranks.strategy}: {copies}; {kept}")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2g} %" if whole else "0 %"
