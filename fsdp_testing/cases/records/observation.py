"""A rank's report on its own state, and the cost of each operation.

Local pieces only: a rank names which elements of which original parameter it holds, as half-open spans of the flattened
parameter, and their values. Reading them needs no communication and changes nothing, so that observing does not repair a
stale state. Tensors are typed `Any`: records depend only on the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

GATHERS = ("all_gather",)
REDUCTIONS = ("reduce_scatter", "all_reduce", "all_to_all")
"""How names of collectives begin that gather parameters or reduce gradients."""

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}


@dataclass(frozen=True, slots=True)
class OperationAccount:
    """One operation on one rank.

    Attributes:
        index: Position in the program; -1 for wrapping.
        backward: Whether a backward ran in it.
        gathered: Units that were gathered, once for each time.
        held: Units whose full parameters are in memory when it ends, each with their bytes (0: not known).
        gather_bytes: Size of the result of each all-gather.
        reduction_bytes: Size of each reduction's input.
    """

    index: int
    backward: bool = False
    gathered: tuple[str, ...] = ()
    held: tuple[tuple[str, int], ...] = ()
    gather_bytes: tuple[int, ...] = ()
    reduction_bytes: tuple[int, ...] = ()


def wire_bytes(dtype: str, numel: int) -> int:
    """Return the bytes of `numel` elements; one byte each for an unknown dtype."""
    return numel * _BYTES.get(dtype, 1)


@dataclass(frozen=True, slots=True)
class ObservedPiece:
    """The elements [start, stop) of a flattened original tensor that this rank holds.

    Attributes:
        start: First element, inclusive.
        stop: Last element, exclusive; a rank without elements reports no piece, or an empty one.
        value: 1-D tensor of `stop - start` elements.
    """

    start: int
    stop: int
    value: Any


@dataclass(frozen=True, slots=True)
class ParameterObservation:
    """One original parameter as one rank sees it.

    Attributes:
        fqn: Name in the unwrapped module (the first one, for a shared parameter).
        shape: Shape of the whole parameter.
        dtype: Dtype of the held values, such as `float32`.
        requires_grad: Flag of the parameter that the optimizer sees.
        pieces: Values held here.
        grad_pieces: Gradient held here; None if the gradient is None.
        grad_dtype: Dtype of the gradient; None without one.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    pieces: tuple[ObservedPiece, ...]
    grad_pieces: tuple[ObservedPiece, ...] | None
    grad_dtype: str | None


@dataclass(frozen=True, slots=True)
class BufferObservation:
    """One buffer of one rank: never sharded, never reduced."""

    fqn: str
    dtype: str
    value: Any


@dataclass(frozen=True, slots=True)
class OptimizerObservation:
    """Optimizer state of one original parameter on one rank.

    Attributes:
        fqn: Name of the parameter.
        tensors: Per state name (`exp_avg`) the pieces held here.
        scalars: Per state name (`step`) the value.
    """

    fqn: str
    tensors: Mapping[str, tuple[ObservedPiece, ...]] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one rank reports at one marked point.

    Attributes:
        index: Operation after which it was taken; `len(program)` at the end.
        label: Label of the `observe` operation, or `end`.
        parameters: Parameters by FQN.
        buffers: Buffers by FQN.
        optimizer: Optimizer state by FQN; None if the implementation does not show it.
    """

    index: int
    label: str
    parameters: Mapping[str, ParameterObservation]
    buffers: Mapping[str, BufferObservation]
    optimizer: Mapping[str, OptimizerObservation] | None = None


@dataclass(frozen=True, slots=True)
class OperationResult:
    """What one operation gave on one rank.

    Attributes:
        index: Position in the program.
        values: Named results: `loss`, `output.0`, `total_norm`, as tensors.
    """

    index: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RaisedError:
    """An exception that an operation raised on one rank.

    Attributes:
        index: Operation that raised; -1 while building or wrapping.
        type_name: Qualified name of the exception's class.
        message: Its text.
        traceback: The formatted traceback.
        not_implementation_fault: The harness or the adapter raised: no verdict on the implementation.
        not_supported: The implementation said so itself (NotImplementedError).
    """

    index: int
    type_name: str
    message: str
    traceback: str
    not_implementation_fault: bool = False
    not_supported: bool = False


@dataclass(frozen=True, slots=True)
class RankObservation:
    """The report of one rank on one case; `leaks` is what the case leaked in the process, if that was checked."""

    rank: int
    results: tuple[OperationResult, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    error: RaisedError | None = None
    seconds: float = 0.0
    leaks: tuple[str, ...] = ()

    def extended(self, kind: type[Extended], **more: Any) -> Extended:
        """Return it as an observation of a class with `more` fields."""
        return kind(**{item.name: getattr(self, item.name) for item in fields(RankObservation)}, **more)


Extended = TypeVar("Extended", bound=RankObservation)


OUTLIVES = "the model stays in memory after its case: something still refers to it"
"""The reported leak when it is the case's model."""

PARAMETERS_OUTLIVE = (
    "parameters: the model is dropped, and a parameter stays in memory with its gradient; "
    "look for a hook of a parameter that refers to the parameter"
)
"""The same where it is a parameter."""


@dataclass(frozen=True, slots=True)
class CaseRecord:
    """Everything that a judge reads about one case on one rank; a field of None was not observed, and is not judged.

    Attributes:
        index: Place of the case in its batch.
        observation: The engine's observation.
        collectives: Per group key, number of collectives issued and a digest of what they were, up to the end of the
            case, counted from the start of the batch.
        groups: Per group key, the ranks of the world that are its members.
        leaks: The case's leaks in the process.
        accounts: What operations put on the wire and left in memory, where the implementation reports its units.
    """

    index: int
    observation: RankObservation
    collectives: Mapping[int, tuple[int, int]] | None = None
    leaks: tuple[str, ...] = ()
    accounts: tuple[OperationAccount, ...] | None = None
    groups: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
