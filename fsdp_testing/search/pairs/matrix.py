"""The result of each pair, computed once from the verdicts on cases for terminal, page and JSON; and the sheet of the matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from fsdp_testing.base.document import Format
from fsdp_testing.cases.records import Verdict
from fsdp_testing.report.drawings.squares import matrix_picture
from fsdp_testing.report.sheet import Cell, Facts, Line, Picture, Row, RowGroup, Section, Sheet, Table, numbered
from fsdp_testing.search.campaign.tally import CampaignTally
from fsdp_testing.search.pairs.covering import Covering, Pair
from fsdp_testing.search.pairs.traits import traits_of
from fsdp_testing.search.state import State, Verdicts

FORMAT = Format("fsdp_testing/pairs", 1)

HOLDS, FAILS, REFUSED, KNOWN, UNKNOWN, OPEN = "holds", "fails", "refused", "fails as known", "unknown", "not run yet"
NOT_CLAIMED, NOT_EXPRESSIBLE, NOT_MET = "not claimed", "not expressible", "not met"
WORDS = (HOLDS, FAILS, REFUSED, KNOWN, UNKNOWN, OPEN, NOT_MET, NOT_CLAIMED, NOT_EXPRESSIBLE)
ASKED = WORDS[: WORDS.index(OPEN)]
"""The possible results of a tested pair. It holds if one case with the pair passes; else it has the verdict of all of them."""


FAILING = {Verdict.FAIL: "fail", Verdict.UNKNOWN: "are unknown"}
"""How the conclusion names cases that decide the exit code."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of every pair.

    Attributes:
        implementation: Its name.
        environment: Versions.
        exit_code: 1 if a failing case is no known failure, 3 if one is unknown or none decides, else 0.
        cases: How many cases have each verdict, including variants without the cause of a known failure.
        traits: Traits in alphabetical order.
        counts: How many pairs have each result.
        matrix: For each trait one letter for each earlier trait: the index in `words` of the pair's result.
        words: Meanings of the letters.
        reasons: What is not claimed, expressible or met -> why -> how many pairs.
        wrong: Pairs without a passing case -> their result, and why the first case does not pass.
    """

    implementation: str
    environment: Mapping[str, str]
    exit_code: int
    cases: Mapping[str, int]
    traits: tuple[str, ...]
    counts: Mapping[str, int]
    matrix: tuple[str, ...]
    words: tuple[str, ...]
    reasons: Mapping[str, Mapping[str, int]]
    wrong: tuple[tuple[str, str, str, str], ...]

    def word(self, row: int, column: int) -> str:
        """Return the result of the pair of a trait and an earlier one."""
        return self.words[int(self.matrix[row][column])]

    @property
    def conclusion(self) -> str:
        """Return it in a sentence."""
        asked = sum(self.counts.get(word, 0) for word in ASKED)
        parts = [f"{self.counts.get(HOLDS, 0):,} of {asked:,} pairs that were asked hold"]
        for word in (FAILS, REFUSED, KNOWN, UNKNOWN, OPEN, NOT_MET):
            parts += [f"{self.counts[word]:,} {word}"] if self.counts.get(word) else []
        # Each pair of a failing case may hold in another one.
        for verdict in (Verdict.FAIL, Verdict.UNKNOWN):
            number = self.cases.get(verdict.value, 0)
            parts += [f"cases that {FAILING[verdict]}: {number:,} of {sum(self.cases.values()):,}"] if number else []
        return "; ".join(parts)

    def to_json(self) -> str:
        """Return it as a JSON document."""
        return FORMAT.write(self, indent=1)


def summary_of(
    name: str, environment: Mapping[str, str], covering: Covering, state: State, tally: CampaignTally | None = None
) -> Summary:
    """Return the summary of a campaign on the cases of a covering.

    Args:
        name: The implementation.
        environment: Versions.
        covering: The cases that ran, and the pairs that were not tested.
        state: State of all runs; it may be that of one part of the covering.
        tally: Tally of the last run, which may add remarks to the verdicts on cases.
    """
    first, of = state.shard
    part = covering.cases[first - 1 :: of]
    verdicts = Verdicts(state.verdicts, {int(number): reason for number, reason in state.reasons.items()})
    became: dict[Pair, str] = {}
    because: dict[Pair, str] = {}
    for number, case in enumerate(part):
        word, why = _word(verdicts, number)
        for pair in combinations(sorted(traits_of(case)), 2):
            if pair not in became or _rank(word) < _rank(became[pair]):
                became[pair], because[pair] = word, why
    closed = {
        **dict.fromkeys(covering.not_claimed, NOT_CLAIMED),
        **dict.fromkeys(covering.not_expressible, NOT_EXPRESSIBLE),
        **dict.fromkeys(covering.not_met, NOT_MET),
    }
    words = {pair: became.get(pair) or closed.get(pair, OPEN) for pair in combinations(covering.traits, 2)}
    traits = covering.traits
    return Summary(
        implementation=name,
        environment=environment,
        exit_code=(tally or CampaignTally()).exit_code_for(state.counts()),
        cases={verdict.value: count for verdict, count in state.counts().items()},
        traits=traits,
        counts=dict(Counter(words.values())),
        matrix=tuple(
            "".join(str(WORDS.index(words[low, high])) for low in traits[:at]) for at, high in enumerate(traits)
        ),
        words=WORDS,
        reasons={
            NOT_CLAIMED: dict(Counter(covering.not_claimed.values()).most_common()),
            NOT_EXPRESSIBLE: dict(Counter(covering.not_expressible.values()).most_common()),
            NOT_MET: {" with ".join(pair): 1 for pair in covering.not_met},
        },
        wrong=tuple(_wrong(words, because)),
    )


def _word(verdicts: Verdicts, number: int) -> tuple[str, str]:
    """The result that the verdict on a case gives its pairs, and the reason."""
    verdict = verdicts[number] if number < len(verdicts) else None
    reason = verdicts.reasons.get(number)
    why = reason.text if reason is not None else ""
    if verdict is Verdict.FAIL:
        return (REFUSED if reason is not None and reason.refused else FAILS), why
    named = {Verdict.PASS: HOLDS, Verdict.EXPECTED_FAILURE: KNOWN, Verdict.UNKNOWN: UNKNOWN, None: OPEN}
    return named[verdict], why


def _rank(word: str) -> int:
    """Of all cases with a pair, the one with the lowest rank decides its result."""
    return (HOLDS, FAILS, REFUSED, UNKNOWN, KNOWN, OPEN).index(word)


def _wrong(words: Mapping[Pair, str], because: Mapping[Pair, str]) -> Iterator[tuple[str, str, str, str]]:
    for word in (FAILS, REFUSED, UNKNOWN, KNOWN):
        yield from ((*pair, word, because[pair]) for pair, became in words.items() if became == word)


AT_SIGHT = 12
CASES = {
    Verdict.PASS: "pass", Verdict.FAIL: "fail", Verdict.UNKNOWN: "unknown", Verdict.EXPECTED_FAILURE: "fail as known",
}  # fmt: skip
CAPTION = (
    "One row and one column for each trait, which is named where they meet. Green: a case with both is right. Red: each case "
    "with both fails. Brown: each is a known failure. Violet: unknown, or with an edge alone: no case was made. Grey: refused. "
    "Pale: no legal case has both. Empty: not claimed, or not run."
)
_CLASSES = {
    HOLDS: "holds", FAILS: "fails", REFUSED: "refused", KNOWN: "known", UNKNOWN: "unknown", NOT_MET: "not_met",
    NOT_EXPRESSIBLE: "impossible",
}  # fmt: skip
_TROUBLE = (FAILS, REFUSED, UNKNOWN, KNOWN, NOT_MET)
_KINDS = {FAILS: "fail", REFUSED: "fail", UNKNOWN: "unknown", NOT_MET: "unknown", KNOWN: "stale"}


def pairs_sheet(summary: Summary) -> Sheet:
    """Return the sheet of a run of every pair."""
    total = sum(summary.counts.values())
    facts = tuple((word, f"{summary.counts[word]:,}") for word in WORDS if summary.counts.get(word))
    cases = ", ".join(
        f"{count:,} {CASES.get(Verdict(verdict), verdict)}" for verdict, count in sorted(summary.cases.items())
    )
    sections = [
        Section(
            "Pairs",
            (
                Picture(
                    matrix_picture(summary.traits, summary.word, _CLASSES, _TROUBLE),
                    CAPTION,
                    "Every pair of traits",
                    table=_table(summary),
                ),
            ),
            anchor="pairs",
        )
    ]
    for word in _TROUBLE:
        lines = tuple(Line(f"{one} with {other}: {why}") for one, other, became, why in summary.wrong if became == word)
        sections.append(Section(_title(word), lines, anchor=_anchor(word), kind=_KINDS[word], at_sight=AT_SIGHT))
    for word in (NOT_MET, NOT_EXPRESSIBLE, NOT_CLAIMED):
        lines = tuple(Line(f"{numbered(count, 'pair')}: {why}") for why, count in summary.reasons[word].items())
        sections.append(Section(_title(word), lines, anchor=f"{_anchor(word)}-why", at_sight=AT_SIGHT))
    return Sheet(
        title=f"{summary.implementation}: every pair of traits",
        exit_code=summary.exit_code,
        conclusion=f"{summary.implementation}: {summary.conclusion}",
        lead=(
            Line(f"{numbered(len(summary.traits), 'trait')}, {numbered(total, 'pair')}; cases: {cases}"),
            Facts(facts),
        ),
        sections=tuple(section for section in sections if section.blocks),
        subject=f"{summary.implementation}, every pair of traits",
        environment=summary.environment,
    )


def _title(word: str) -> str:
    return word.capitalize()


def _anchor(word: str) -> str:
    return word.replace(" ", "-")


def _table(summary: Summary) -> Table:
    """Return, for the terminal, the pairs of each trait that do not hold; a trait whose pairs all hold is left out."""
    counts = [Counter[str]() for _ in summary.traits]
    for row, letters in enumerate(summary.matrix):
        for column in range(len(letters)):
            word = summary.word(row, column)
            counts[row][word] += 1
            counts[column][word] += 1
    columns = tuple(word for word in (*_TROUBLE, OPEN) if summary.counts.get(word))
    rows = [
        Row(trait, tuple(Cell(f"{count[word]:,}" if count[word] else "-", _KINDS.get(word, "")) for word in columns))
        for trait, count in zip(summary.traits, counts)
        if any(count[word] for word in columns)
    ]
    return Table("pairs of a trait", columns, (RowGroup(tuple(rows)),), numbers=True)
