"""Records the inputs of forwards: a digest of each row, copies that outlive the step, and the batches of all ranks as one."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_testing.base import compat
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.train.sample_lists import are_samples_apart, columns, is_of_samples, parts_of, samples_in
from fsdp_testing.train.script_objects import attributes, packed, with_attributes
from fsdp_testing.train.spans import plain

_MOST_ROWS = 2**17
"""Rows of a batch that have digests. In one process a batch has the rows of all ranks, so a smaller number would miss some."""


@dataclass(frozen=True, slots=True)
class Call:
    """One outermost forward with gradients; `determines_loss` when a scalar that can be differentiated comes out of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    determines_loss: bool


_OF = "of "
_MOST_SILENT = 8
"""Most tensors kept from forwards without gradients: a validation makes many."""


class Computed:
    """Outputs of forwards in this step and the one before: in another forward, as one player's in another's, they are no data.

    If their rows come in other memory, such as joined to rows of data, they are known by the rows that they were computed from:
    their own bits depend on how many rows were computed together.
    """

    def __init__(self) -> None:
        self._now: list[tuple[torch.Tensor, tuple[str, ...]]] = []
        self._before: list[tuple[torch.Tensor, tuple[str, ...]]] = []
        self._silent: deque[tuple[torch.Tensor, tuple[str, ...]]] = deque(maxlen=_MOST_SILENT)
        self._is_silent = False

    def add(self, output: Any, rows: tuple[str, ...]) -> None:
        """Note the rows that a forward returned; keep their memory, so that it is not reused."""
        self._now += [(tensor.detach(), rows) for tensor in tensors_in(output) if _memory(tensor)]

    def silently(self, call: Callable[[], Any], given: Any) -> Any:
        """Run a forward that is not compared; note the output of a forward without gradients, if no other forward runs it."""
        if self._is_silent or torch.is_grad_enabled():
            return call()
        rows, self._is_silent = self.row_digests(given), True
        try:
            output = call()
        finally:
            self._is_silent = False
        self._silent.extend((tensor.detach(), rows) for tensor in tensors_in(output) if _memory(tensor))
        return output

    def end_step(self) -> None:
        """Forget the outputs of the step before."""
        self._before, self._now = self._now, []

    def row_digests(self, tree: Any) -> tuple[str, ...]:
        """Return a digest of each row of inputs that are no output of a forward."""
        known = {_memory(tensor) for tensor, _ in (*self._before, *self._now)}
        if samples_in(tree) and not any(_memory(tensor) in known for tensor in tensors_in(tree)):
            return row_digests(tree)
        tensors = [t for t in tensors_in(tree) if not known or not (_memory(t) in known or _depends_on_parameters(t))]
        digests = row_digests(tensors)
        traced = [self._traced(tensor) for tensor in tensors if tensor.ndim and len(tensor) == len(digests)]
        return tuple(
            "+".join(row) if any(part.startswith(_OF) for part in row) else digest
            for digest, *row in zip(digests, *traced)
        )

    def _traced(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """Return a digest of each row, or of the row that a forward computed it from."""
        origins: dict[str, str] = {}
        for other, rows in (*self._before, *self._now, *self._silent):
            alike = other.ndim > 1 and other.shape[1:] == tensor.shape[1:] and other.dtype == tensor.dtype
            if alike and len(rows) == len(other):
                origins |= zip(row_digests([other]), rows)
        return tuple(_OF + origins[row] if row in origins else row for row in row_digests([tensor]))


class Backpropagated:
    """Which forwards of a step a gradient comes back to, or to another that is given what they return.

    One that acts in a game, or warms up, trains on no rows.
    """

    def __init__(self) -> None:
        self._without = set[int]()
        self._outputs: list[tuple[torch.Tensor, int]] = []

    def watch(self, forward: int, output: Any) -> None:
        """Wait for the gradient of what a forward returned; it counts as backpropagated if none can come, as for no tensor."""
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not tensors or any(tensor.is_leaf or compat.is_transformed(tensor) for tensor in tensors):
            return
        without = self._without
        without.add(forward)
        self._outputs += [(tensor.detach(), forward) for tensor in tensors if _memory(tensor)]
        for tensor in tensors:
            tensor.register_hook(lambda _: without.discard(forward))

    def see_given(self, given: Any) -> None:
        """Note what another forward is given, such as what a generator made, detached, for the judge."""
        memories = {_memory(tensor) for tensor in tensors_in(given)} if self._outputs else set()
        self._without -= {forward for tensor, forward in self._outputs if _memory(tensor) in memories}

    def idle(self) -> frozenset[int]:
        """Return the forwards of the step to which nothing came back so far."""
        return frozenset(self._without)

    def end_step(self) -> None:
        """Forget the forwards of a step."""
        self._without, self._outputs = set(), []


def _depends_on_parameters(tensor: torch.Tensor) -> bool:
    """Whether a tensor would send a gradient to a parameter, for example because it was made from a forward's output."""
    waiting, known = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if isinstance(getattr(node, "variable", None), torch.nn.Parameter):
            return True
        if node is not None and node not in known:
            known.add(node)
            waiting += [function for function, _ in node.next_functions]
    return False


def _memory(tensor: torch.Tensor) -> int:
    """Return the address of a tensor; 0 without memory of its own, as for a DTensor."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def tensors_in(tree: Any, around: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Return the tensors of nested lists, tuples, mappings, dataclasses and objects of a script's classes.

    `around` are the identities of what holds it: an object may name the one that holds it.
    """
    if isinstance(tree, torch.Tensor):
        return [tree]
    if id(tree) in around:
        return []
    around = (*around, id(tree))
    return [tensor for part in parts_of(tree) for tensor in tensors_in(part, around)]


@compat.no_transforms()
def on_cpu(tree: Any) -> Any:
    """Return a copy of nested lists, tuples and mappings with detached tensors on the CPU, which can be sent (`packed`)."""
    return packed(tree, lambda tensor: local_part(tensor).cpu().clone())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, dense; a DTensor names its part itself. Inside `vmap` it has the rows of all calls."""
    tensor = compat.outside_of_transforms(tensor)
    shard = getattr(tensor, "to_local", None)
    part = plain(shard() if callable(shard) else tensor)
    return part if part.layout is torch.strided else part.to_dense()


class Row(str):
    """Digest of the bits of a row, and what is near in rows that differ by roundings.

    Attributes:
        others: Digest of whatever in it is no real number.
        sums: Over its real numbers: with fixed weights between -1 and 1, and their norm.
        numel: Its elements.
    """

    __slots__ = ("numel", "others", "sums")

    numel: int
    others: str
    sums: tuple[float, float]


@compat.no_transforms()
def row_digests(tree: Any) -> tuple[str, ...]:
    """Return a digest of each row: of the first tensor with rows, and of all others with as many; or of each listed sample."""
    count = samples_in(tree)
    if count:
        samples = [[on_cpu(tensors_in(part)) for part in column] for column in columns(tree, count)]
        return tuple(
            _digest_of([tensor for column in samples for tensor in column[place]])
            for place in range(min(count, _MOST_ROWS))
        )
    tensors = [local_part(tensor).cpu() for tensor in tensors_in(tree) if tensor.ndim]
    rows = [tensor.contiguous() for tensor in tensors if len(tensor) == len(tensors[0])]
    if not rows:
        return ()
    raw = [tensor.reshape(len(tensor), -1).view(torch.uint8) if tensor.numel() else tensor for tensor in rows]
    others = [part for part, tensor in zip(raw, rows) if not tensor.is_floating_point()]
    sums = _sums([tensor for tensor in rows if tensor.is_floating_point() and tensor.numel()], len(rows[0]))
    digests = []
    for place in range(min(len(raw[0]), _MOST_ROWS)):
        row = Row(_digest(raw, place))
        row.others, row.sums = _digest(others, place), sums[place]
        row.numel = sum(tensor[place].numel() for tensor in rows)
        digests.append(row)
    return tuple(digests)


_NEAR = 1e-4
"""Roundings of some steps move float32 numbers by less, as a part of their norm; what draws random numbers moves them by more."""
_MOST_NEAR = 4096
"""Rows that are compared by their sums: each is compared with each."""


def _digest(parts: Sequence[torch.Tensor], row: int) -> str:
    return hashlib.blake2b(b"".join(part[row].numpy().tobytes() for part in parts), digest_size=8).hexdigest()


def _digest_of(tensors: Sequence[torch.Tensor]) -> str:
    parts = (part for tensor in tensors for part in (str(tuple(tensor.shape)).encode(), _bytes(tensor)))
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _sums(tensors: Sequence[torch.Tensor], rows: int) -> list[tuple[float, float]]:
    sums = torch.zeros(rows, 2, dtype=torch.float64)
    for tensor in tensors:
        flat = tensor.reshape(rows, -1).double()
        sums[:, 0] += flat @ torch.arange(1.0, flat.shape[1] + 1, dtype=torch.float64).cos()
        sums[:, 1] += flat.square().sum(1)
    return [(weighted, norm) for weighted, norm in zip(sums[:, 0].tolist(), sums[:, 1].sqrt().tolist())]


def near(one: Counter[str], other: Counter[str]) -> bool:
    """Whether rows are equal but for roundings, as rows that are computed from a model's output are."""
    left, right = [*(one - other).elements()], [*(other - one).elements()]
    if len(left) != len(right) or len(left) > _MOST_NEAR:
        return False
    for row in left:
        match = next((place for place, candidate in enumerate(right) if _is_near(row, candidate)), None)
        if match is None:
            return False
        del right[match]
    return True


def _is_near(one: str, two: str) -> bool:
    if not (isinstance(one, Row) and isinstance(two, Row)) or one.others != two.others:
        return False
    bound = _NEAR * max(one.sums[1], two.sums[1])
    return math.isfinite(bound) and all(abs(a - b) <= bound for a, b in zip(one.sums, two.sums))


def holds_a_loss(output: Any) -> bool:
    """Whether a scalar that can be differentiated is in what a forward returned."""
    values = [getattr(output, "loss", None), *tensors_in(output)]
    return any(isinstance(value, torch.Tensor) and value.ndim == 0 and value.requires_grad for value in values)


def joined(parts: Sequence[Any], depth: int = 0, counts: Sequence[int] = ()) -> Any:
    """Return the batches of all ranks as one: tensors with rows and lists of samples are joined, everything else is rank 0's.

    Args:
        parts: A batch of each rank.
        depth: How far inside a batch they are; negative around it.
        counts: How many samples each rank's lists hold, if they are of samples.

    Raises:
        InvalidArgument: Tensors of the ranks have rows of different shapes.
    """
    first = parts[0]
    if depth == 0 and not counts:
        found = [samples_in(part) for part in parts]
        # A rank whose samples happen to be of one length has as many as it has elements.
        counts = [count or -1 for count in found] if any(found) else ()
    of_samples = any(is_of_samples(part, count) for part, count in zip(parts, counts)) or are_samples_apart(parts)
    if depth > 0 and of_samples:
        return type(first)([sample for part in parts for sample in part])
    if isinstance(first, torch.Tensor):
        if not first.ndim:
            return first
        try:
            return torch.cat(list(parts))
        except RuntimeError as error:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise InvalidArgument(
                f"data: expected rows of one shape on all ranks, got batches {shapes}. Pad rows to one length, "
                f"because one process gets all of them at once."
            ) from error
    if isinstance(first, dict):
        return {key: joined([part[key] for part in parts], depth + 1, counts) for key in first}
    own = [attributes(part) for part in parts]
    if own[0]:
        of_all = {name: [(each or {}).get(name) for each in own] for name in own[0]}
        return with_attributes(first, {name: joined(each, depth + 1, counts) for name, each in of_all.items()})
    if isinstance(first, (list, tuple)):
        return type(first)([joined(column, depth + 1, counts) for column in zip(*parts)])
    return first
