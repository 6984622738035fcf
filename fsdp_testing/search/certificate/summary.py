"""A certificate in numbers: computed once; terminal, page and JSON show the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_testing.base.document import ADDED_LATER, Format, decode
from fsdp_testing.cases.records import Verdict
from fsdp_testing.errors import InvalidRecord
from fsdp_testing.search.certificate.axes import (
    CLEARING,
    DTYPES,
    EVERY_RANK,
    TRAITS,
    UNITS,
    Cell,
    cube,
    schedules,
    skips,
)
from fsdp_testing.search.certificate.cases import needs_of
from fsdp_testing.search.certificate.causes import CauseFinder, CellCause
from fsdp_testing.search.certificate.certify import CONFIRMED_ALONE, Certificate

FORMAT = Format("fsdp_testing/certificate", 3)
VERDICTS = tuple(verdict.value for verdict in (Verdict.PASS, Verdict.FAIL, Verdict.UNKNOWN))
"""The possible verdicts on a cell that ran."""
_PASS, _FAIL, _UNKNOWN = VERDICTS


@dataclass(frozen=True, slots=True)
class Summary:
    """A certificate.

    Attributes:
        implementation: Its name.
        environment: Versions.
        source: Digest of the implementation and of the harness.
        cube: Cells in all.
        not_claimed: Capabilities that cells need and the implementation does not claim -> how many cells.
        asked: Cells of this sample or shard.
        earlier: How many of the cells that ran did so in earlier runs.
        verdicts: How many of the cells that ran pass, fail, or are unknown.
        faces: Strategy and mesh -> face -> the same counts for the cells there.
        reasons: Why cells are unknown -> how many.
        causes: Why cells fail.
        unconfirmed: Failing cells that were not run again alone, because others that look alike failed again alone.
        unexplained: Failing cells without a cause, because the time ran out.
        failing: Names of the cells that fail.
        seconds: Time spent, over all runs.
        sample: How many cells were to be taken from the cube; 0 for all.
        shard: `(i, n)`: it is the i-th of n parts; empty for the whole.
    """

    implementation: str
    environment: Mapping[str, str]
    source: str
    cube: int
    not_claimed: Mapping[str, int]
    asked: int
    earlier: int
    verdicts: Mapping[str, int]
    faces: Mapping[str, Mapping[str, Mapping[str, int]]]
    reasons: Mapping[str, int]
    causes: tuple[CellCause, ...]
    unconfirmed: int
    unexplained: int
    failing: tuple[str, ...]
    seconds: float
    sample: int = field(default=0, metadata=ADDED_LATER)
    shard: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)

    @property
    def ran(self) -> int:
        return sum(self.verdicts.values())

    @property
    def exit_code(self) -> int:
        """Return 1 if a cell fails, 3 if one is unknown or none holds, else 0."""
        if self.verdicts[_FAIL]:
            return 1
        return 3 if self.verdicts[_UNKNOWN] or not self.verdicts[_PASS] else 0

    def at(self, world: str, face: str) -> Counter[str]:
        """Return how many cells of each verdict lie on a face, in the worlds whose name begins so."""
        counts: Counter[str] = Counter()
        for name, faces in self.faces.items():
            if f"{name} ".startswith(f"{world} "):
                counts.update(faces.get(face, {}))
        return counts

    def conclusion(self) -> str:
        others = [(_FAIL, "fail"), (_UNKNOWN, "are unknown")]
        text = f"{self.verdicts[_PASS]:,} of {self.ran:,} cells hold"
        text += "".join(f"; {self.verdicts[status]:,} {verb}" for status, verb in others if self.verdicts[status])
        left = self.asked - self.ran
        return text + (f"; {left:,} of {self.asked:,} have not run yet" if left else "")

    def notes(self) -> list[str]:
        """Return further remarks, a sentence each."""
        missing = sum(self.not_claimed.values())
        notes = [f"The cube has {self.cube:,} cells."]
        notes += [f"{missing:,} of them are not claimed, and were skipped."] if missing else []
        notes += [f"{self.earlier:,} cells ran in earlier runs, and not again."] if self.earlier else []
        if self.unconfirmed:
            alone = f"{CONFIRMED_ALONE} that look like each of them failed again alone"
            notes.append(
                f"{self.unconfirmed:,} of the failing cells failed in a batch and were not run alone; {alone}."
            )
        if self.unexplained:
            notes.append(
                f"{self.unexplained:,} failing cells were not explained, because the time of --explain ran out."
            )
        return notes

    def to_json(self) -> str:
        """Return it as a JSON document; each cause with its case."""
        return FORMAT.write(self, indent=1)


def read_summary(text: str, where: str) -> Summary:
    """Read what `certify --json` wrote.

    Raises:
        InvalidRecord: It is damaged, or of another version.
    """
    body = FORMAT.read(text, where)
    if "statuses" in body:
        raise InvalidRecord(f"{where}: expected verdicts, got a certificate of an earlier version. Make it again.")
    summary = decode(Summary, body, where)
    counted = [summary.verdicts, *(counts for faces in summary.faces.values() for counts in faces.values())]
    odd = [counts for counts in counted if {*counts} - {*VERDICTS} or min(counts.values(), default=0) < 0]
    if odd or {*summary.verdicts} != {*VERDICTS}:
        got = dict((odd or [summary.verdicts])[0])
        raise InvalidRecord(
            f"{where}: expected counts of {', '.join(VERDICTS)}, got {str(got)[:100]!r}. It is damaged."
        )
    if not 0 <= summary.ran <= summary.asked <= summary.cube:
        raise InvalidRecord(
            f"{where}: expected no more cells that ran than were asked of {summary.cube:,}, got {summary.ran:,} of "
            f"{summary.asked:,}. It is damaged."
        )
    return summary


def summary_of(certificate: Certificate, finder: CauseFinder, environment: Mapping[str, str]) -> Summary:
    """Return the summary of a certificate; finds the causes now."""
    plan, verdicts = certificate.plan, certificate.verdicts
    adapter = plan.implementation
    needs = Counter(needs_of(cell) for cells in cube() for cell in cells)
    missing: Counter[str] = Counter()
    for need, count in needs.items():
        missing[", ".join(sorted(need - adapter.capabilities))] += count
    del missing[""]
    counts = verdicts.counts()
    unknown = Counter(verdicts.reasons[number].text for number in verdicts.numbers(Verdict.UNKNOWN))
    return Summary(
        implementation=adapter.name,
        environment=environment,
        source=certificate.source,
        cube=needs.total(),
        not_claimed=dict(missing.most_common()),
        asked=len(certificate.cells),
        earlier=certificate.earlier,
        verdicts={word: counts[Verdict(word)] for word in VERDICTS},
        faces=_faces(certificate),
        reasons=dict(unknown.most_common()),
        causes=tuple(finder.find()),
        unconfirmed=sum(not verdicts.reasons[number].confirmed for number in verdicts.numbers(Verdict.FAIL)),
        unexplained=finder.unexplained,
        failing=tuple(cell.name for cell in certificate.failing()),
        seconds=certificate.seconds,
        sample=plan.sample or 0,
        shard=plan.shard if plan.shard != (1, 1) else (),
    )


def _faces(certificate: Certificate) -> dict[str, dict[str, dict[str, int]]]:
    counts = Counter(
        (f"{cell.strategy} {cell.mesh}", face, verdict.value)
        for cell in certificate.cells
        if (verdict := certificate.verdict(cell)) is not None
        for face in faces_of(cell)
    )
    by_face: dict[str, dict[str, dict[str, int]]] = {}
    for (world, face, word), count in sorted(counts.items()):
        by_face.setdefault(world, {}).setdefault(face, {})[word] = count
    return by_face


def faces_of(cell: Cell) -> list[str]:
    """Return the faces on which a cell lies besides its strategy and mesh, as `axis: value`."""
    second = "the first again" if cell.second == cell.first else "S alone"
    skipping = "no rank" if not skips(cell.first) else "every rank" if cell.skipping == EVERY_RANK else "one rank"
    values = {**{axis: getattr(cell, axis) for axis in VALUES}, "second": second, "skipping": skipping}
    return ["all", *(f"{axis}: {value}" for axis, value in values.items())]


VALUES: Mapping[str, tuple[str, ...]] = {
    "units": tuple(UNITS),
    "trait": tuple(TRAITS),
    "clearing": tuple(CLEARING),
    "dtype": tuple(DTYPES),
    "first": tuple(schedules()),
}
FACES = (
    "all",
    *(f"{axis}: {value}" for axis, values in VALUES.items() for value in values),
    *(f"second: {value}" for value in ("S alone", "the first again")),
    *(f"skipping: {value}" for value in ("no rank", "every rank", "one rank")),
)
"""Every face besides strategies and meshes, in the order in which it is shown."""
