"""Reads the ledger of a rank from outside, also when the rank is dead or stuck."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp_testing.ranks.ledger.memory import Area
from fsdp_testing.ranks.ledger.records import group_facts


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One collective as a rank's ledger holds it.

    `number` counts the collectives of its group in this job, from 1. `group` is the readable name of the group and
    `group_key` its identity on all ranks. `moment_ns` is the system-wide monotonic clock. Ranks that issue records of
    equal `signature` together are in order, though shapes in `what` may differ.
    """

    number: int
    group: str
    group_key: int
    what: str
    call_site: str
    moment_ns: int = 0
    signature: int = 0

    def __str__(self) -> str:
        where = "" if self.group == "default group" else f" on {self.group}"
        head, space, shape = self.what.partition(" ")
        return f"{head} #{self.number}{space}{shape}{where}"


@dataclass(frozen=True, slots=True)
class RankLedger:
    """What one rank issued in a job.

    Attributes:
        begun: Whether the rank has begun the job.
        entries: The last collectives over all groups, oldest first.
        issued: Collectives by group key.
        digests: One number for the whole sequence by group key, equal on ranks that issued the same.
        members: Ranks of the world in each group, by group key.
        uncompared: Groups that did not fit in the ledger; nothing is known about them.
    """

    begun: bool
    entries: tuple[CollectiveRecord, ...]
    issued: dict[int, int]
    digests: dict[int, int]
    members: dict[int, tuple[int, ...]]
    uncompared: int = 0


class AreaView:
    """The current ledger of a rank on this machine; empty when the rank has not begun job `epoch`."""

    def __init__(self, area: Area) -> None:
        self._area = area

    def read(self, epoch: int, last: int = 8) -> RankLedger:
        """Return what the rank issued, with its last collectives."""
        area = self._area
        if area.epoch() != epoch:
            return RankLedger(False, (), {}, {}, {})
        # Strings first: a group or a text added during the read gets no name rather than a wrong one.
        strings = area.strings()
        groups = area.groups()
        entries: list[CollectiveRecord] = []
        facts = group_facts(strings)
        for slot, (key, count, _) in enumerate(groups):
            label = facts[key][0] if key in facts else ""
            for number in range(max(1, count - last + 1), count + 1):
                entry = area.entry(slot, number)
                if entry is not None:
                    what, site = (strings[i] if i < len(strings) else "?" for i in (entry.description, entry.call_site))
                    entries.append(CollectiveRecord(number, label, key, what, site, entry.moment_ns, entry.signature))
        entries.sort(key=lambda entry: entry.moment_ns)
        members = {key: facts[key][1] for key, _, _ in groups if key in facts}
        issued = {key: count for key, count, _ in groups}
        digests = {key: digest for key, _, digest in groups}
        return RankLedger(True, tuple(entries[-last:]), issued, digests, members, area.uncompared())

    def counts(self, epoch: int) -> dict[int, int]:
        """Return how many collectives it issued, by group key; cheap enough to be asked many times a second."""
        return {key: count for key, count, _ in self._area.groups()} if self._area.epoch() == epoch else {}

    def refused(self, epoch: int) -> int:
        """Return how many of its collectives were refused."""
        return self._area.refused() if self._area.epoch() == epoch else 0

    def uncompared(self) -> int:
        """Return how many groups found no room."""
        return self._area.uncompared()

    def copy(self, epoch: int) -> ReportedLedger:
        """Return the current contents, ready to send."""
        return ReportedLedger(epoch, self.read(epoch), self.refused(epoch))


@dataclass(frozen=True, slots=True)
class ReportedLedger:
    """The ledger of a rank on another host, as that host last reported it."""

    epoch: int = 0
    ledger: RankLedger = RankLedger(False, (), {}, {}, {})
    refusals: int = 0

    def read(self, epoch: int, last: int = 8) -> RankLedger:
        """Like `AreaView`, as are the other methods."""
        if epoch != self.epoch:
            return RankLedger(False, (), {}, {}, {})
        return replace(self.ledger, entries=self.ledger.entries[-last:])

    def counts(self, epoch: int) -> dict[int, int]:
        return self.read(epoch).issued

    def refused(self, epoch: int) -> int:
        return self.refusals if epoch == self.epoch else 0

    def uncompared(self) -> int:
        return self.ledger.uncompared
