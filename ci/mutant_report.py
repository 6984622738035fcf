"""What became of the mutants of ci/sampled_mutants.py: the share that was caught, every survivor, and the page of both."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mutant_subjects import Mutant

EXPLAINED = Path(__file__).with_name("sampled-mutants-explained.toml")
STAGES = ("pairs", "run", "tensor", "fuzz")
"""Who looks at a mutant, the quickest first."""
UNEXECUTED = "nothing of pairs, run and tensor executes it"


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a mutant.

    Attributes:
        mutant: Its identity.
        stage: What failed first; empty if nothing did.
        account: The failing check or finding; empty if there is none.
        stages: Those that looked at it and found nothing, or the last one something.
        hung: It was caught because all of it did not end.
        harness: State of the tree that looked at it.
        seconds: How long that took.
        executed: Whether anything executes it.
        unknown: How many verdicts on it are neither pass nor fail.
    """

    mutant: str
    stage: str
    account: str
    stages: Sequence[str]
    hung: bool
    harness: str
    seconds: float
    executed: bool = True
    unknown: int = 0


def explanations() -> dict[tuple[str, str, str, str], str]:
    """Why each known survivor changes nothing that anybody could notice."""
    entries = tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).get("survivor", [])
    return {(each["file"], each["function"], each["removed"], each["added"]): each["why"] for each in entries}


def wilson(caught: int, judged: int) -> tuple[float, float]:
    """Wilson's interval for a share, at 95 %."""
    if not judged:
        return 0.0, 1.0
    z, share = 1.959964, caught / judged
    middle = share + z * z / (2 * judged)
    spread = z * math.sqrt(share * (1 - share) / judged + z * z / (4 * judged * judged))
    return max(0.0, (middle - spread) / (1 + z * z / judged)), min(1.0, (middle + spread) / (1 + z * z / judged))


def report(mutants: Sequence[Mutant], fates: Mapping[str, Fate], stages: Sequence[str]) -> int:
    """Tells the share that was caught, by file, and every survivor; returns the exit code."""
    known = explanations()
    tried = [mutant for mutant in mutants if mutant.identity in fates]
    left = [mutant for mutant in tried if not fates[mutant.identity].stage]
    equivalent = [mutant for mutant in left if mutant.name in known]
    print("\ntried  caught  (hung)  explained  caught of the others, 95 % interval  where; by stage")
    for place in (*dict.fromkeys(mutant.place for mutant in tried), ""):
        here = [fates[mutant.identity] for mutant in tried if place in ("", mutant.place)]
        same = sum(place in ("", mutant.place) for mutant in equivalent)
        caught, judged = sum(bool(fate.stage) for fate in here), len(here) - same
        by = ", ".join(f"{stage} {count}" for stage in STAGES if (count := sum(fate.stage == stage for fate in here)))
        told = share(judged, caught)
        print(f"{len(here):5} {caught:7} {sum(f.hung for f in here):7} {same:10}  {told}  {place or 'all'}; {by}")
    for mutant in left:
        why, fate = known.get(mutant.name), fates[mutant.identity]
        print(f"\n{'explained' if why else 'NOT CAUGHT'}: {mutant.place}:{mutant.first} {mutant.function}")
        print("\n".join(f"    {line}" for line in mutant.diff))
        asked = f"asked: {', '.join(fate.stages)}; unknown {fate.unknown}" if fate.executed else UNEXECUTED
        print(f"    {why or asked}")
    waiting = len(mutants) - len(tried)
    waiting += sum(fates[m.identity].executed and bool(set(stages) - set(fates[m.identity].stages)) for m in left)
    if waiting:
        print(f"\n{waiting} of {len(mutants)} were not tried, or not by every stage; run again to go on")
    return 0 if len(left) == len(equivalent) and not waiting else 1


PAGE = """\
# Mutants that the harness alone judges

A mutant is one small change of a line in the code under test. Here fsdp-testing alone looks at it: every pair of traits
(`run --pairs`), the checks (`run`; `tensor` is `run --tensor-parallel 2` on 4 ranks), and random cases for five minutes
(`fuzz`); no unit test. `tox -e sampled-mutants -- --page` makes this page. mutmut proposes the changes, a hash chooses among
them, and each is tried in a copy.

A mutant that none of the first three executes counts as not caught. Explained ones are left out of the share: they change
nothing that a user could notice, or they run only on devices.

{date}, {versions}. The interval is Wilson's, at 95 %.

"""


def share(judged: int, caught: int) -> str:
    """A share with its interval."""
    low, high = wilson(caught, judged)
    return f"{caught} of {judged}: {caught / max(1, judged):.1%} ({low:.1%} to {high:.1%})"


def page(samples: Mapping[str, Sequence[Mutant]], fates: Mapping[str, Fate], versions: str) -> str:
    """The page of the samples of some subjects, as far as they were tried."""
    return PAGE.format(date=datetime.now(UTC).date(), versions=versions) + "".join(_lines(samples, fates))


def _lines(samples: Mapping[str, Sequence[Mutant]], fates: Mapping[str, Fate]) -> Iterator[str]:
    known = explanations()
    for subject, mutants in samples.items():
        tried = [mutant for mutant in mutants if mutant.identity in fates]
        left = [fates[m.identity] for m in tried if not fates[m.identity].stage and m.name not in known]
        waiting = sum(fate.executed and bool(set(STAGES) - set(fate.stages)) for fate in left)
        yield f"## {subject}\n\n{len(tried)} of a sample of {len(mutants)} were tried. {len(left)} were not caught and are not "
        yield f"explained; {waiting} of these were not yet asked by every stage.\n\n"
        yield f"| file | {' | '.join(STAGES)} | explained | caught of the others |\n"
        yield f"| --- | {' | '.join(['---:'] * len(STAGES))} | ---: | --- |\n"
        for place in (*sorted({mutant.place for mutant in tried}), ""):
            here = [mutant for mutant in tried if place in ("", mutant.place)]
            stages = [fates[mutant.identity].stage for mutant in here]
            same = sum(not stage and mutant.name in known for stage, mutant in zip(stages, here))
            counts = " | ".join(str(stages.count(stage)) for stage in STAGES)
            caught = sum(map(bool, stages))
            yield f"| {f'`{place}`' if place else 'all'} | {counts} | {same} | {share(len(here) - same, caught)} |\n"
        yield "\n### Survivors\n\n"
        for mutant in tried:
            fate = fates[mutant.identity]
            if not fate.stage:
                asked = f"Not caught by {', '.join(fate.stages)}." if fate.executed else f"{UNEXECUTED.capitalize()}."
                what = known.get(mutant.name) or asked
                yield f"- `{mutant.place}`, `{mutant.function}`: {what}\n\n"
                yield "  ```diff\n" + "".join(f"  {line}\n" for line in mutant.diff) + "  ```\n"
        yield "\n"
