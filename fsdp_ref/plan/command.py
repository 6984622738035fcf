"""What is drawn, and what of: the options, the model, one block of text for each unit that is unlike the others."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_ref.errors import ConfigError
from fsdp_ref.plan.traffic import LIBRARIES, messages, peak_bytes, step_seconds

if TYPE_CHECKING:
    from fsdp_ref.plan.unit_layouts import UnitLayout

DESCRIPTION = "Draw which rank holds which elements of which parameter, with alignment gaps and padding."
RANKS_DRAWN = 16
BAR_WIDTH = 48
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
DTYPES = ("float32", "float64", "float16", "bfloat16")

Build = Callable[[str, Any], tuple[Any, tuple[str, ...]]]
"""Makes a model from a name and a dtype; gives it and the units that it has by default."""


def declare(command: argparse.ArgumentParser, more: str = "") -> None:
    """Add the options to a parser; `more` says which models are known besides."""
    command.add_argument(
        "model",
        metavar="MODEL",
        help=f"{more}llama-8b, llama-70b, llama-405b, mixture-8x7b, or package.module:factory (built on the meta device)",
    )
    command.add_argument(
        "--world-size", type=_count, metavar="N", help="number of ranks (default 2, or those of --mesh)"
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
    command.add_argument(
        "--memory", type=_positive, metavar="GIB", help="say whether training fits in this much memory on each rank"
    )
    command.add_argument(
        "--tokens", type=_count, default=4096, metavar="N", help="rows of a micro-batch, such as tokens (default 4096)"
    )
    command.add_argument(
        "--traffic",
        choices=LIBRARIES,
        metavar="LIBRARY",
        help=f"also count what a step sends: {', '.join(LIBRARIES)} (units in the order in which the model names them)",
    )
    command.add_argument(
        "--rates",
        type=_rates,
        metavar="GB/s,TFLOP/s",
        help="with --traffic: rate of a rank's link in each direction, and rate at which it computes",
    )
    command.add_argument("--packed", action="store_true", help="no gaps between parameters, no padding of the total")


def drawn(options: argparse.Namespace, names: Sequence[str] = (), build: Build | None = None) -> Iterator[str]:
    """Yield the lines of the drawing.

    Args:
        options: As `declare` declares them.
        names: Models that are known besides.
        build: Makes one of them.

    Raises:
        ConfigError: Options that do not go together, or a model that cannot be built or laid out.
    """
    from fsdp_ref.plan.unit_layouts import unit_layouts

    ranks = _ranks(options)
    if options.rates and not options.traffic:
        raise ConfigError(
            f"--rates: expected --traffic LIBRARY with it (one of {', '.join(LIBRARIES)}), got none. "
            "The time of a step depends on what the library sends."
        )
    if options.rank is not None and not 0 <= options.rank < ranks.world:
        raise ConfigError(f"--rank: expected 0 to {ranks.world - 1}, got {options.rank}. Ranks count from 0.")
    model, units = _model(options.model, options.dtype, names, build)
    layouts = unit_layouts(model, world_size=ranks.shards, units=options.unit or units, aligned=not options.packed)
    if not layouts:
        raise ConfigError(f"plan: expected a model with parameters, got {options.model!r}. There is nothing to shard.")
    alike: dict[UnitLayout, list[str]] = {}
    for unit in layouts:
        alike.setdefault(replace(unit, name=""), []).append(unit.name)
    for unit, same in alike.items():
        yield from _unit(replace(unit, name=same[0]), None if options.rank is None else options.rank % ranks.shards)
        if same[1:]:
            yield f"  the same: {', '.join(same[1:3])}{f' ... {same[-1]}' * (len(same) > 3)}; {len(same)} in all"
            yield ""
    yield from _totals(layouts, ranks)
    yield from _training(layouts, ranks, options)
    if options.traffic:
        yield from _traffic(layouts, ranks, options)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one rank, a second: billions of bytes over its link in each direction, millions of millions of operations."""

    link_gigabytes: float
    teraflops: float


def _rates(text: str) -> Rates:
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"expected two numbers above 0 as 50,400 (GB/s, TFLOP/s), got {text!r}")
    return Rates(*map(_positive, parts))


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
        raise ConfigError(
            f"--mesh: expected RxS with the hybrid strategies and with no other, got {options.mesh or 'none'} with {strategy}. "
            "Pass, say, --strategy HYBRID_SHARD --mesh 2048x8."
        )
    if not hybrid:
        size = options.world_size or 2
        return Ranks(strategy, *((size, 1) if strategy == "NO_SHARD" else (1, size)))
    parts = options.mesh.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(
            f"--mesh: expected two numbers of at least 1 such as 2048x8, got {options.mesh!r}. Name replicas, then shards."
        )
    ranks = Ranks(strategy, *map(int, parts))
    if options.world_size not in (None, ranks.world):
        raise ConfigError(
            f"--world-size: expected {ranks.world}, the ranks of --mesh {options.mesh}, got {options.world_size}. Leave it out."
        )
    return ranks


def _model(name: str, dtype: str, names: Sequence[str], build: Build | None) -> tuple[Any, tuple[str, ...]]:
    """Return the module and the units it has by default."""
    import torch

    from fsdp_ref.plan.known_models import DECODERS

    if name in DECODERS:
        return DECODERS[name].build(getattr(torch, dtype)), ("Block",)
    if name in names and build is not None:
        return build(name, getattr(torch, dtype))
    module_name, separator, path = name.partition(":")
    if not separator:
        known = (*names, *DECODERS)
        # "llama-like 70B" is compared by its letters and digits alone.
        plain = {re.sub(r"\W|_|like", "", word.lower()): word for word in known}
        near = difflib.get_close_matches(re.sub(r"\W|_|like", "", name.lower()), plain, n=2, cutoff=0.6)
        hint = f"Did you mean {' or '.join(plain[word] for word in near)}?" if near else "Name a model."
        raise ConfigError(f"plan: expected one of {', '.join(known)} or `package.module:factory`, got {name!r}. {hint}")
    try:
        model: Any = importlib.import_module(module_name)
        for part in path.split("."):
            model = getattr(model, part)
        if not isinstance(model, torch.nn.Module):
            with torch.device("meta"):
                model = model()
    except Exception as error:
        raise ConfigError(
            f"plan: expected {name} to give a module when called without arguments, got "
            f"{type(error).__name__}: {error}. Correct the factory, or write one."
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"plan: expected {name} to give a torch.nn.Module, got {type(model).__name__}. Return one.")
    return model, ()


def _unit(unit: UnitLayout, rank: int | None) -> Iterator[str]:
    layout, shards = unit.shards.layout, unit.shards
    padding = shards.padded_numel - layout.params_numel
    yield (
        f"{unit.name or '(root)'} {unit.class_name}: {layout.params_numel:,} elements of {unit.dtype} in {len(layout)} "
        f"parameters; {shards.shard_numel:,} ({_bytes(shards.shard_numel * unit.element_bytes)}) a rank; "
        f"{padding:,} of padding ({_share(padding, shards.padded_numel)})"
    )
    yield from _table(_parameter_rows(unit) if rank is None else _piece_rows(unit, rank))
    if rank is None and shards.world_size <= RANKS_DRAWN and layout.numel:
        yield from _bars(unit)
    yield ""


def _table(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


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


def _totals(units: Sequence[UnitLayout], ranks: Ranks) -> Iterator[str]:
    elements = sum(unit.shards.layout.params_numel for unit in units)
    shard = sum(unit.shards.shard_numel * unit.element_bytes for unit in units)
    padded = sum(unit.shards.padded_numel for unit in units)
    largest = max(units, key=lambda unit: unit.shards.padded_numel * unit.element_bytes)
    gathered = largest.shards.padded_numel * largest.element_bytes
    yield (
        f"{len(units)} units, {elements:,} elements on {ranks.world:,} ranks: {_bytes(shard)} of "
        f"parameters a rank, {_share(padded - elements, padded)} padding; largest gather {_bytes(gathered)} "
        f"({largest.name or 'root'})"
    )
    whole = _bytes(sum(unit.shards.padded_numel * unit.element_bytes for unit in units))
    copies = f"{ranks.replicas:,} replicas of {ranks.shards:,} consecutive ranks" if ranks.replicas > 1 else "one copy"
    if ranks.strategy == "NO_SHARD":
        kept = "each rank holds all of it, and gradients are averaged over all ranks"
    elif ranks.strategy in {"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"}:
        kept = f"gathered units stay until their backward: up to {whole} a rank"
    else:
        kept = "gathered units are freed after their forward and gathered again for their backward"
    yield f"{ranks.strategy}: {copies}; {kept}"


def _training(units: Sequence[UnitLayout], ranks: Ranks, options: argparse.Namespace) -> Iterator[str]:
    """Yield the memory that training takes on each rank, by a stated rule, and whether it fits.

    The rule: gradients are kept as parameters are; Adam keeps two float32 numbers for each; gathered units are held as
    `peak_bytes` says, and one unsharded gradient beside them; each matrix (rows x columns) keeps its input and its output,
    `rows + columns` numbers of each token, though some share them. Attention scores, logits in float32, fragments and
    what the allocator keeps are not counted.
    """
    shard = sum(unit.shards.shard_numel * unit.element_bytes for unit in units)
    numbers = sum(unit.shards.shard_numel for unit in units)
    wholes = [unit.shards.padded_numel * unit.element_bytes for unit in units]
    library = options.traffic or "fsdp_ref"
    on_cpu, on_device = (
        peak_bytes(units, strategy=ranks.strategy, library=library, has_streams=streams) for streams in (False, True)
    )
    # Where units lie in units, all may be gathered at once.
    gathered = 0 if on_device == 0 else (sum(wholes) if on_device is None else on_device) + max(wholes)
    matrices = [(p.shape[-2:], unit.element_bytes) for unit in units for p in unit.shards.layout.params if p.shape[1:]]
    kept = sum(sum(sizes) * element_bytes for sizes, element_bytes in matrices) * options.tokens
    parts = {
        "parameters": shard,
        "gradients": shard,
        "optimizer state (Adam, float32)": 8 * numbers,
        "gathered units and a whole gradient": gathered,
        f"activations of {options.tokens:,} tokens": kept,
    }
    total = sum(parts.values())
    yield f"training, a rank: {_bytes(total)} = {' + '.join(f'{_bytes(size)} {name}' for name, size in parts.items())}"
    if on_cpu is not None and on_device is not None:
        devices = "" if on_cpu == on_device else f"; {_bytes(on_cpu)} on the CPU, where nothing is kept for kernels"
        yield f"  gathered units of {library} at once, after the first step: {_bytes(on_device)}{devices}"
    yield "  activations: input and output of each matrix, nothing recomputed; attention scores and fragments not counted"
    if options.memory is not None:
        room = int(options.memory * 1024**3)
        left = f"{_bytes(room - total)} to spare" if total <= room else f"{_bytes(total - room)} too much"
        yield f"{'fits' if total <= room else 'does not fit'} in {options.memory:g} GiB: {left}"


def _traffic(units: Sequence[UnitLayout], ranks: Ranks, options: argparse.Namespace) -> Iterator[str]:
    library, rates = options.traffic, options.rates
    sent = messages(units, strategy=ranks.strategy, replicas=ranks.replicas, library=library)
    counts = Counter(message.op for message in sent)
    kinds = ", ".join(f"{number} {op}" for op, number in counts.items())
    yield (
        f"a step of {library}: {len(sent)} collectives ({kinds}), {_bytes(sum(message.full_bytes for message in sent))} gathered "
        f"and reduced, {_bytes(round(sum(message.link_bytes for message in sent)))} over the link of a rank in a ring"
    )
    if rates is None:
        return
    elements = sum(unit.shards.layout.params_numel for unit in units)
    seconds = step_seconds(
        sent, elements, tokens=options.tokens, link_bytes=rates.link_gigabytes * 1e9, flops=rates.teraflops * 1e12
    )
    yield (
        f"at these rates: {seconds[0]:.4g} s of computation (6 operations for each element and token), {seconds[1]:.4g} s of "
        f"communication; a step takes {max(seconds):.4g} s if they overlap all the time, {sum(seconds):.4g} s if never"
    )


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else 0.0
    return f"{share:.2g} %" if share < 10 else f"{share:,.0f} %"


def _bytes(count: int) -> str:
    power = min(int(math.log(count, 1024)), 4) if count else 0
    size = count / 1024**power
    return f"{size:.{4 if size >= 1000 else 3}g} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"
