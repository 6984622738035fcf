"""What is known of one case on one rank? All that a judge reads, whoever ran the case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_testing.records.account import OperationAccount
from fsdp_testing.records.observation import RankObservation


@dataclass(frozen=True, slots=True)
class CaseRecord:
    """What one rank reports of one case; what is None was not observed, and is not judged.

    Attributes:
        index: Place of the case in its batch.
        observation: What the engine observed.
        collectives: Per group key, number of collectives issued and a digest of what they were, up to the end of the
            case, counted from the start of the batch.
        leaks: What the case left behind in the process.
        accounts: What operations put on the wire and left in memory, where the implementation reports its units.
    """

    index: int
    observation: RankObservation
    collectives: Mapping[int, tuple[int, int]] | None = None
    leaks: tuple[str, ...] = ()
    accounts: tuple[OperationAccount, ...] | None = None
