"""Examines an adapter, so that its own mistakes are not blamed on the implementation behind it.

Mistakes that only the adapter can make end the run here: names, spans, promised methods that are missing. Mistakes that the
implementation may make too, such as changing values, buffers or flags while wrapping, belong to checks
(`construction.keeps_numbers`, `construction.keeps_buffers`) and get a verdict. Values shown at the wrong place may be either:
they are the adapter's mistake if the adapter shows the right values in another way.

Two steps. `check_claims` reads the adapter alone. `examine_on_rank` runs on every rank of a small world: it wraps the
simplest models and examines the result, before any gradient is computed. `validate` does both and raises
`InvalidImplementation` with every problem.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.defaults import OPTIONAL_WITHOUT_DEFAULT
from fsdp_testing.adapters.protocol import METHODS_OF_CAPABILITY, Piece, Setup
from fsdp_testing.base.documentation import page
from fsdp_testing.cases.models import MODELS, ZooModel
from fsdp_testing.cases.records import STRATEGIES, check_capabilities
from fsdp_testing.errors import InvalidImplementation, WorldFailed

#: Simple enough that any implementation must take them: layers in a row, and layers with buffers.
_MODELS = ("mlp", "buffers")

_GUIDE = (
    "This is the adapter's mistake; the implementation gets no verdict: "
    f"{page('docs/adapters.md')} shows what is expected."
)


def validate(adapter: Adapter, run_on_ranks: Callable[..., list[Any]], world_size: int = 2) -> None:
    """Examine an adapter that was loaded by its name, which is how ranks find it.

    Args:
        adapter: The adapter (`registry.load`).
        run_on_ranks: `fsdp_testing.run_ranks` or its like.
        world_size: How many ranks examine it.

    Raises:
        InvalidImplementation: The adapter is unfit; every problem of every rank is listed.
    """
    check_claims(adapter)
    name = adapter.reference
    try:
        found = run_on_ranks(examine_on_rank, adapter, size=world_size)
    except WorldFailed as failed:
        raise InvalidImplementation(
            f"implementation {name!r}: expected an adapter that wraps two layers on every rank, got:\n"
            f"{_account(failed)}\n{_GUIDE}"
        ) from failed
    problems = list(dict.fromkeys(problem for of_rank in found for problem in of_rank))
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise InvalidImplementation(
            f"implementation {name!r}: expected an adapter that does what it claims, got:\n{listed}\n{_GUIDE}"
        )


def _account(failed: WorldFailed) -> str:
    """Return the errors that ranks raised, each text once; the whole account if a rank died, or none raised.

    Errors of other ranks after a death (a closed connection) are not causes.
    """
    ranks = getattr(failed.outcome, "ranks", ())
    dead = [rank for rank in ranks if rank.fate == "died"]
    if dead:
        said = "\n".join(f"  - {rank.headline()} in `wrap`, or in a method of the adapter" for rank in dead)
        return f"{said}\n{failed}"
    errors = [rank.error for rank in ranks if rank.error is not None]
    texts = [error.message for error in errors if error.type_name.endswith("InvalidImplementation")]
    return "\n".join(f"  - {text}" for text in dict.fromkeys(texts)) or str(failed)


def check_claims(adapter: Adapter) -> None:
    """Known tags, one strategy at least, and a method for every tag that needs one.

    Raises:
        InvalidImplementation: Every offender is listed.
    """
    where = f"implementation {adapter.name!r}"
    claimed = check_capabilities(adapter.capabilities, f"{where}: capabilities")
    problems = []
    if not claimed & set(STRATEGIES.values()):
        problems.append(f"claims no strategy; claim one of {', '.join(sorted(set(STRATEGIES.values())))}")
    for tag in sorted(claimed & set(METHODS_OF_CAPABILITY)):
        # By default nothing is traced, of which all rules hold.
        needed = {*OPTIONAL_WITHOUT_DEFAULT, *(("trace_units",) if tag == "unit_trace" else ())}
        missing = [m for m in METHODS_OF_CAPABILITY[tag] if m in adapter.missing and m in needed]
        if missing:
            problems.append(f"claims {tag!r} without the method{'s' * (len(missing) > 1)} {', '.join(missing)}")
    if problems:
        raise InvalidImplementation(
            f"{where}: expected the methods for every claim, got: {'; '.join(problems)}. {_GUIDE}"
        )


def examine_on_rank(adapter: Adapter) -> list[str]:
    """Return everything that is wrong with the adapter as this rank sees it; empty if nothing is.

    Collectives: those of the adapter, and one object all-gather per model; every rank of the default group calls.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    problems: list[str] = []
    with warnings.catch_warnings():
        # Ranks may have inherited a test session's filters, and a warning of the implementation is no mistake.
        warnings.simplefilter("ignore")
        for model_name in _MODELS:
            if MODELS[model_name].needs <= adapter.capabilities:
                problems += _examine(adapter, MODELS[model_name], rank, size, mesh)
    return problems


def _examine(adapter: Adapter, model: ZooModel, rank: int, size: int, mesh: DeviceMesh) -> list[str]:
    strategy = next((s for s, tag in STRATEGIES.items() if tag in adapter.capabilities and tag != "hybrid"), None)
    if strategy is None:
        return []  # hybrid alone needs four ranks
    units = model.units if "nested_wrapping" in adapter.capabilities else ()
    setup = Setup(rank, size, torch.device("cpu"), group=dist.group.WORLD, mesh=mesh, units=units, strategy=strategy)
    module, original = model.build(0), model.build(0)
    before = _global_state()
    found: list[str] = []
    try:
        wrapped = adapter.wrap(module, setup)
        found += [f"wrap({model.name}) changed {what}" for what in _changed(before, _global_state())]
        if not isinstance(wrapped, nn.Module):
            found.append(f"wrap({model.name}) returned {type(wrapped).__name__}, not an nn.Module")
        elif wrapped.training != original.training:
            found.append(f"wrap({model.name}) turned training mode {'on' if wrapped.training else 'off'}")
        else:
            found += _wrong_content(adapter, wrapped, original)
        found += [] if found else _broken_methods(adapter, wrapped, original)
        adapter.finish(wrapped)
    except Exception as error:
        # Raise instead of returning: other ranks may wait for this one in a collective, and the whole world must end.
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{model.name}: {type(error).__name__}: {error} (at {last.filename}:{last.lineno})"
        raise InvalidImplementation(text) from error
    return found


def _global_state() -> dict[str, Any]:
    return {
        "the default dtype": torch.get_default_dtype(),
        "the grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "the number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [f"{what} from {old} to {after[what]}" for what, old in before.items() if after[what] != old]


def _wrong_content(adapter: Adapter, wrapped: nn.Module, original: nn.Module) -> Iterator[str]:
    expected = dict(original.named_parameters())
    local = adapter.local_pieces(wrapped)
    yield from _wrong_names("local_pieces", set(expected), set(local))
    buffers, original_buffers = dict(adapter.named_buffers(wrapped)), dict(original.named_buffers())
    yield from _wrong_names("named_buffers", set(original_buffers), set(buffers))
    if not any(isinstance(p, nn.Parameter) for _, p in adapter.named_parameters(wrapped)):
        yield "named_parameters gives no parameter, so there is nothing for an optimizer"
    problems = [p for fqn, pieces in local.items() if fqn in expected for p in _wrong_spans(fqn, pieces, expected[fqn])]
    yield from problems
    # Every rank takes part, even one that has found a problem: the others wait for it.
    gathered: list[dict[str, list[tuple[int, int]]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {fqn: [(p.start, p.stop) for p in pieces] for fqn, pieces in local.items()})
    ranks = [part for part in gathered if part is not None]
    for fqn, parameter in expected.items():
        covered = set().union(*(range(a, b) for part in ranks for a, b in part.get(fqn, ())))
        shown = any(fqn in part for part in ranks)  # a name that is missing everywhere has been reported already
        if shown and not problems and len(covered) != parameter.numel():
            yield f"local_pieces[{fqn!r}] of all ranks cover {len(covered)} of {parameter.numel()} elements"
    if not problems and set(local) == set(expected):
        yield from _misplaced(adapter, wrapped, local, expected)


def _wrong_names(method: str, expected: set[str], got: set[str]) -> Iterator[str]:
    if expected != got:
        missing, extra = sorted(expected - got), sorted(got - expected)
        yield f"{method} expects the names of the unwrapped module, missing {missing}, unknown {extra}"


def _wrong_spans(fqn: str, pieces: tuple[Piece, ...], parameter: nn.Parameter) -> Iterator[str]:
    end = 0
    for piece in sorted((p for p in pieces if p.value is not None), key=lambda p: p.start):
        where = f"local_pieces[{fqn!r}] span [{piece.start}, {piece.stop})"
        numel = 0 if piece.value is None else piece.value.numel()
        if tuple(piece.shape) != tuple(parameter.shape):
            yield f"{where} names shape {tuple(piece.shape)}, the parameter has {tuple(parameter.shape)}"
        if not 0 <= piece.start <= piece.stop <= parameter.numel():
            yield f"{where} is outside the parameter's {parameter.numel()} elements"
        elif numel != piece.stop - piece.start:
            yield f"{where} comes with {numel} elements"
        elif piece.start < end and piece.stop > piece.start:
            yield f"{where} overlaps the span before it"
        end = max(end, piece.stop)


def _misplaced(
    adapter: Adapter, wrapped: nn.Module, local: Mapping[str, tuple[Piece, ...]], expected: Mapping[str, nn.Parameter]
) -> Iterator[str]:
    """Parameters whose pieces show wrong values, compared with the adapter's own `full_parameters`.

    Collectives: those of `full_parameters`, where the adapter has one; every rank calls.
    """
    if "full_parameters" in adapter.missing:
        return
    with adapter.full_parameters(wrapped, writeback=False) as full:
        kept = {fqn for fqn in expected if fqn in full and torch.equal(full[fqn].detach(), expected[fqn].detach())}
    for fqn in sorted(kept):
        flat = expected[fqn].detach().reshape(-1)
        if any(
            p.value is not None and not torch.equal(p.value.reshape(-1), flat[p.start : p.stop]) for p in local[fqn]
        ):
            yield f"local_pieces shows the values of {fqn!r} at the wrong place: full_parameters shows the right ones"


def _broken_methods(adapter: Adapter, wrapped: nn.Module, original: nn.Module) -> Iterator[str]:
    """Claimed methods that need no gradient are called once."""
    if "no_sync" in adapter.capabilities:
        adapter.no_sync(wrapped)  # what it returns is looked at there
    if "summon_writeback" in adapter.capabilities:
        with adapter.full_parameters(wrapped, writeback=False) as full:
            shapes = {fqn: tuple(tensor.shape) for fqn, tensor in full.items()}
        expected = {fqn: tuple(parameter.shape) for fqn, parameter in original.named_parameters()}
        yield from _wrong_names("full_parameters", set(expected), set(shapes))
        wrong = sorted(fqn for fqn in expected.keys() & shapes.keys() if shapes[fqn] != expected[fqn])
        if wrong:
            yield f"full_parameters gives different shapes from the unwrapped module for {wrong}"
