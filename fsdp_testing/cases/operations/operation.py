"""The base of a training program's operations, and the inputs of their micro-batches.

An operation is data: what it does depends on its own fields and the case, never on its position, so that deleting any
other operation leaves its inputs unchanged. Its class holds everything about it: the record, how it is drawn and made
legal, what it needs and costs, its names in sentences and scripts, how it becomes simpler, what it does on a rank and in
the oracle. `FACETS` names what every class must define; the rest has a default here.

Callers that run, draw or judge pass themselves in: this package imports none of them, and torch only to make numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from fsdp_testing.errors import InvalidRecord

if TYPE_CHECKING:
    from fsdp_testing.cases.drawing.features import Swarm
    from fsdp_testing.cases.drawing.normal_form import ProgramContext
    from fsdp_testing.cases.drawing.operation_drawer import OperationDrawer
    from fsdp_testing.oracle.execute import RankProgram, Values
    from fsdp_testing.oracle.replay import Replay, Results


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one micro-batch, different on every rank.

    Attributes:
        seed: Together with the rank it determines every number of the inputs and targets.
        rows: Number of rows, one entry for all ranks or one per rank (cycled); 0 is an empty batch.
        usage: Which optional branches of the model run, one mask for all ranks or one per rank (cycled); an empty tuple
            uses all. Models without branches ignore it.
        scale: Factor on the inputs, so that micro-batches can be distinguished by magnitude.
        alike: Every rank has the inputs of rank 0, so that unreduced gradients also equal the mean.
    """

    seed: int
    rows: tuple[int, ...] = (4,)
    usage: tuple[tuple[bool, ...], ...] = ()
    scale: float = 1.0
    alike: bool = False

    def __post_init__(self) -> None:
        if not self.rows or any(rows < 0 for rows in self.rows):
            raise InvalidRecord(f"Batch.rows: expected one or more sizes >= 0, got {self.rows}. Give rows=(4,).")

    def rows_of(self, rank: int) -> int:
        """Return the number of rows of `rank`."""
        return self.rows[rank % len(self.rows)]

    def usage_of(self, rank: int) -> tuple[bool, ...] | None:
        """Return the usage mask of `rank`, or None if every branch runs."""
        return self.usage[rank % len(self.usage)] if self.usage else None

    def without_rank(self, rank: int, size: int) -> Batch:
        """Return the batch of `size` ranks that is empty on `rank`."""
        return replace(self, rows=tuple(0 if other == rank else self.rows_of(other) for other in range(size)))

    def required(self) -> frozenset[str]:
        """Return the capabilities that such inputs need."""
        uneven = {"uneven_batches"} if len(set(self.rows)) > 1 or 0 in self.rows else set()
        partial = {"unused_parameters"} if any(not all(mask) for mask in self.usage) else set()
        differ = {"unused_parameters_differ"} if len(set(self.usage)) > 1 else set()
        return frozenset(uneven | partial | differ)

    def plain(self) -> Batch:
        """Return the simplest batch with the same numbers: two rows on every rank."""
        return Batch(self.seed, (2,))

    def simpler(self) -> Iterator[Batch]:
        """Yield batches that are simpler by one part, the boldest first; some may be equal to this one."""
        yield self.plain()
        yield replace(self, usage=())
        yield replace(self, usage=self.usage[:1])
        yield replace(self, rows=(2,))
        yield replace(self, scale=1.0)
        yield replace(self, seed=1)

    def script_arguments(self) -> str:
        """Return the batch as arguments in the source of a script."""
        return f"{self.seed}, {self.rows!r}, {self.usage!r}, {self.scale!r}"


T = TypeVar("T")

GRADIENTS_ALIKE = (
    '"assumes that [gradients] will be modified by the optimizer in all processes in the same way": '
    "https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
)
"""Why no program may step by unreduced gradients, which differ between ranks, or scale them by each rank's own norm."""

FACETS = ("draw", "weight", "simpler", "passes", "run", "replay")
"""What every operation must define, because no default would be right."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Base of all operations.

    Attributes:
        kind: Its tag in documents and reports.
        needs: Capabilities an implementation must claim for this operation, whatever its fields.
        features: Features that must be on to draw it or a variant, each with the capabilities that it needs.
        drawn_with: The operation is drawn only if one of these features is on; empty means its own features.
        share: Its weight in such a draw.
        passes: How often it gathers each unit besides forwards and backwards; None if unknown.
        forbidden_while_pending: Which documentation forbids it while gradients of a `no_sync` micro-batch await reduction;
            empty if none does.
        needs_optimizer: It has no meaning before the optimizer is built.
        builds_optimizer: It builds the optimizer, which is then not built right after wrapping.
        steps: It lets the optimizer change the parameters.
        writes_parameters: It changes numbers of parameters that the implementation shards.
        runs_backward: It runs a backward over each of its micro-batches.
        runs_forward_alone: It runs a forward that no backward follows.
        renews_model: The model and its optimizer are new objects afterwards.
        observes: Every rank reports its pieces after it, in every run.
    """

    kind: ClassVar[str] = "operation"
    needs: ClassVar[frozenset[str]] = frozenset()
    features: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    drawn_with: ClassVar[tuple[str, ...]] = ()
    share: ClassVar[int] = 1
    passes: ClassVar[int | None] = None
    forbidden_while_pending: ClassVar[str] = ""
    needs_optimizer: ClassVar[bool] = False
    builds_optimizer: ClassVar[bool] = False
    steps: ClassVar[bool] = False
    writes_parameters: ClassVar[bool] = False
    runs_backward: ClassVar[bool] = False
    runs_forward_alone: ClassVar[bool] = False
    renews_model: ClassVar[bool] = False
    observes: ClassVar[bool] = False

    # ------------------------------------------------------------------------------------------- what it is

    def batches(self) -> tuple[Batch, ...]:
        """Return the micro-batches that this operation runs: that of a field `batch`, if it has one."""
        batch: Batch | None = getattr(self, "batch", None)
        return () if batch is None else (batch,)

    def without_rank(self, rank: int, size: int) -> Operation:
        """Return the operation whose gradients, among `size` ranks, lack the inputs of `rank`."""
        return self

    def with_batches(self, change: Callable[[Batch], Batch]) -> Self:
        """Return the operation with every batch in its fields changed."""

        def changed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(changed, value))
            return change(value) if isinstance(value, Batch) else value

        fields = {item.name: changed(getattr(self, item.name)) for item in dataclasses.fields(self)}
        return dataclasses.replace(self, **fields)

    def used_alike(self) -> Self:
        """Return the operation with the branches of rank 0 on every rank."""
        return self.with_batches(lambda batch: dataclasses.replace(batch, usage=batch.usage[:1]))

    def required(self) -> frozenset[str]:
        """Return the capabilities that this operation needs."""
        return self.needs.union(*(batch.required() for batch in self.batches()))

    def pending_after(self, pending: bool) -> bool:
        """Return whether gradients await reduction after it, given whether they did before."""
        return pending

    def requires_grad_change(self) -> tuple[tuple[str, ...], bool] | None:
        """Return the patterns of parameters whose `requires_grad` it sets, and the value; None if it sets none."""
        return None

    def new_units(self) -> tuple[str, ...] | None:
        """Return the inner units of the model afterwards, if it wraps a new model by another plan."""
        return None

    def other_plans(self) -> tuple[tuple[str, ...], ...]:
        """Return the inner units of every plan by which it wraps a model."""
        units = self.new_units()
        return () if units is None else (units,)

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks, of `size`, for which it makes a process group."""
        return ()

    def new_dtype(self) -> str | None:
        """Return the dtype to which it casts the whole model, if it does."""
        return None

    # ------------------------------------------------------------------------------------------- drawn and made legal

    @classmethod
    def weight(cls, swarm: Swarm) -> int:
        """Return its weight in one draw."""
        return cls.share if any(feature in swarm for feature in cls.drawn_with or cls.features) else 0

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> Self:
        """Draw one; an operation whose fields all have defaults is drawn with those."""
        return cls()

    def normalise(self, context: ProgramContext) -> Operation | None:
        """Return the nearest operation that has a meaning here, or None if there is none; a legal one comes back equal."""
        return self

    def changes_ignored(self) -> tuple[str, ...]:
        """Return patterns of parameters for which no numbers can be expected if they are outside the implementation."""
        return ()

    def simpler(self) -> Iterator[Operation]:
        """Yield operations that are simpler by one part, the boldest first; some may be equal to this one."""
        raise NotImplementedError

    @property
    def saves_optimizer(self) -> bool:
        """Whether the optimizer's state is saved and loaded."""
        return False

    def other_settings(self) -> Iterator[tuple[str, Operation]]:
        """Yield (operation with one setting changed, the setting's name): what an implementation may have done instead."""
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool):
                yield item.name, dataclasses.replace(self, **{item.name: not value})

    # ------------------------------------------------------------------------------------------- memory and wire

    def most_passes(self, uses: int, *, frees_early: bool) -> int | None:
        """Return how often each unit may be gathered; None if its communication is unknown.

        Args:
            uses: How often one forward may run a part of the model.
            frees_early: The strategy frees parameters after forward.
        """
        return self.passes

    def most_reductions(self, uses: int) -> int:
        """Return how often the gradients of each unit may be reduced, where `most_passes` gives a number."""
        return 0

    def may_stay_unsharded(self, before: frozenset[str], *, frees_early: bool, backward: bool) -> frozenset[str] | None:
        """Return the units whose full parameters may be in memory afterwards; None for any.

        Args:
            before: The units whose full parameters were in memory before.
            frees_early: The strategy frees parameters after forward.
            backward: A backward ran in it.
        """
        return before

    # ------------------------------------------------------------------------------------------- words and source

    def token(self) -> str:
        """Return the kind with the variant that matters, such as `forward[eval]`, for coverage and rules."""
        return self.kind

    def words(self) -> str:
        """Return its name in a sentence: eval-forward, forward-backward in no_sync, step."""
        return self.kind

    def shape(self) -> str:
        """Return the kind, with local micro-batches distinguished, for comparing schedules."""
        return f"{self.kind}(no_sync)" if self.pending_after(False) else self.kind

    def text(self, index: int) -> str:
        """Return it in one line of a report, as operation `index` of its program."""
        shown = []
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Batch):
                shown.append(f"batch {value.seed}")
            elif isinstance(value, tuple) and value and isinstance(value[0], Batch):
                shown.append(f"batches {', '.join(str(batch.seed) for batch in value)}")
            elif value != item.default:
                shown.append(f"{item.name}={value!r}")
        return f"operation {index} {self.kind}({', '.join(shown)})"

    def script_lines(self, name: str) -> list[str] | None:
        """Return its code in a script with torch alone, as lines of a function over `one`.

        Args:
            name: Its name in the script's report.

        Returns:
            Source without indentation; None, as here, if a plain script cannot do it. `one` has the methods of the script's own
            `OneProcess` and `Ranks`; a line that gives numbers yields `(name, [tensors])`.
        """
        return None

    # ------------------------------------------------------------------------------------------- what it does

    def run(self, program: RankProgram) -> Values | None:
        """Run it on the wrapped model of one rank, and return its results by name.

        Collectives: those of the implementation; every rank runs the same operation.
        """
        raise NotImplementedError

    def replay(self, replay: Replay) -> Results | None:
        """Run it in the oracle's one process, and return what every rank must give.

        It notes known bounds of the quantities that it writes with `replay.allow`.
        """
        raise NotImplementedError


class Silent(Operation):
    """An operation without communication and without a simpler form."""

    __slots__ = ()
    passes: ClassVar[int | None] = 0

    def simpler(self) -> Iterator[Operation]:
        return iter(())


@dataclass(frozen=True, slots=True)
class OfPatterns(Operation):
    """An operation on the parameters whose name matches one of its patterns (fnmatch)."""

    patterns: tuple[str, ...]

    def normalise(self, context: ProgramContext) -> Operation | None:
        patterns = context.used_patterns(self.patterns)
        return dataclasses.replace(self, patterns=patterns) if patterns else None

    def simpler(self) -> Iterator[Operation]:
        yield dataclasses.replace(self, patterns=("*",))


def missing_facets(operation: type[Operation]) -> list[str]:
    """Return the facets that `operation` lacks."""
    # An operation without required arguments is drawn without them; one with its own features is drawn with these.
    said = {"weight"} if operation.drawn_with or operation.features else set()
    said |= set() if any(item.default is dataclasses.MISSING for item in dataclasses.fields(operation)) else {"draw"}
    said |= {name for cls in operation.__mro__[: operation.__mro__.index(Operation)] for name in vars(cls)}
    return [facet for facet in FACETS if facet not in said]


def matching(named: Iterable[tuple[str, T]], patterns: Iterable[str]) -> list[tuple[str, T]]:
    """Return the entries whose name matches one of the patterns (fnmatch)."""
    wanted = tuple(patterns)
    return [(name, item) for name, item in named if any(fnmatchcase(name, pattern) for pattern in wanted)]
