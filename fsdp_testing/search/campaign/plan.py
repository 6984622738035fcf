"""The settings of a campaign, and the subject of its verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.drawing import Scope
from fsdp_testing.cases.records import Case
from fsdp_testing.judging.known import KnownFailures
from fsdp_testing.search.state import SOURCE, source_digest


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a campaign.

    Attributes:
        implementation: What is examined; loaded by name, so that ranks find it too.
        scope: The scope of drawing.
        state: The directory of its results.
        seconds: Seconds until the end; None for no limit.
        examples: How many cases to draw at most; None for no limit.
        seed: Determines all choices.
        lanes: Batches under way at a time.
        deadline: Seconds that one case may take.
        shrink_seconds: Time for shrinking one finding.
        known: Failures to count but not to report.
        stop_at_first: End with the first confirmed finding.
        shard: `(i, n)`: draw only every n-th case of the campaign, beginning with the i-th; `examples` counts those of all parts.
        listed: The cases of the campaign, instead of random ones; then the reason is kept for each case that does not pass.
    """

    implementation: Adapter
    scope: Scope
    state: Path
    seconds: float | None = 60.0
    examples: int | None = None
    seed: int = 0
    lanes: int = 2
    deadline: float = 30.0
    shrink_seconds: float = 20.0
    known: KnownFailures = KnownFailures()
    stop_at_first: bool = False
    shard: tuple[int, int] = (1, 1)
    listed: tuple[Case, ...] = ()

    @property
    def drawn_by(self) -> str:
        """Return the settings that determine the cases, besides the implementation, as text to compare."""
        scope = self.scope
        sizes, without = ",".join(map(str, scope.world_sizes)), ",".join(sorted(scope.excluded))
        axis = f", tensor parallelism over {scope.tensor_parallel}" if scope.tensor_parallel > 1 else ""
        source = f"{len(self.listed)} cases that hold every pair" if self.listed else f"seed {self.seed}"
        return f"{source}, world sizes {sizes}{axis}, {scope.max_operations} operations, without {without or 'nothing'}"

    @property
    def subject(self) -> dict[str, str]:
        """Return the subject of the campaign's verdicts, by name."""
        return {
            "implementation": self.implementation.reference,
            "cases by": self.drawn_by,
            "known failures": self.known.digest,
            SOURCE: source_digest(self.implementation),
        }
