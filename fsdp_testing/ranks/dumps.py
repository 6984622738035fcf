"""Reads the dumps that torch's flight recorder wrote for a hanging training, one per rank, and says who waits for whom.

A dump is a pickle, and a pickle may run any code. So the reader admits only instructions that build plain data. It also reads
JSON dumps, but those do not say where a collective was called nor, with gloo, whether it has completed.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import pickletools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_testing.base.document import load_json
from fsdp_testing.errors import InvalidArgument, InvalidRecord
from fsdp_testing.ranks.ledger.reading import CollectiveRecord
from fsdp_testing.ranks.pool.cause import first_difference
from fsdp_testing.ranks.pool.outcome import Fate, RankOutcome, rank_names

_NAME = re.compile(r"(\d{1,6})(?:\.\w+)?$")
_VERSION = "2."
_PLAIN = frozenset(
    re.findall(
        r"\w+",
        """
        PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT UNICODE
        BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_LIST EMPTY_DICT EMPTY_TUPLE LIST DICT TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND
        APPENDS SETITEM SETITEMS PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET DUP
        """,
    )
)
"""Instructions of a pickle that build plain data, and call nothing."""
_LIBRARIES = (
    *(f"/torch/{part}" for part in ("distributed/", "nn/", "autograd/", "optim/", "utils/", "_")),
    *("/fsdp_testing/ranks/ledger/", "/contextlib.py", "<frozen", "<string>", "??"),
)
# Every rank passes equal sizes and dtypes to these; to others a rank may pass its own.
_EVEN = re.compile(
    "all_reduce|broadcast|reduce|_all_gather_base|_reduce_scatter_base|(all_gather|reduce_scatter)_single"
)


@dataclass(frozen=True, slots=True)
class Dumped:
    """One collective as a rank's dump holds it; `pending` if it has not completed."""

    record: CollectiveRecord
    pending: bool
    created_ns: int


@dataclass(frozen=True, slots=True)
class Dump:
    """The dump of one rank.

    Attributes:
        rank: As the name of the file says.
        collectives: Collectives by group and number.
        members: Ranks of the groups that the dump names, by group.
        messages: Sends and receives that have not completed.
        whole: Whether the recorder has dropped nothing.
    """

    rank: int
    collectives: dict[str, dict[int, Dumped]] = field(default_factory=dict)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    whole: bool = False

    @property
    def records(self) -> list[Dumped]:
        """Return all collectives, as they were issued."""
        return sorted(
            (one for numbers in self.collectives.values() for one in numbers.values()), key=lambda one: one.created_ns
        )


def read_dumps(paths: Sequence[Path]) -> list[Dump]:
    """Read the dumps in these files, and in the files of these folders, by rank.

    Raises:
        InvalidArgument: There are no dumps, a file's name does not end with a rank, or two names end with the same one.
        InvalidRecord: A file is no dump.
    """
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    dumps: dict[int, Dump] = {}
    for file in files:
        match = _NAME.search(file.name)
        if match is None or int(match[1]) in dumps:
            what = "a file with a rank that no other has" if match else "a name that ends with the rank"
            raise InvalidArgument(f"diagnose: expected {what}, as nccl_trace_rank_0, got {file.name!r}. Rename it.")
        dumps[int(match[1])] = _dump(int(match[1]), _plain(file), str(file))
    if not dumps:
        raise InvalidArgument(
            f"diagnose: expected dumps of the flight recorder, got none in {', '.join(map(str, paths))}."
        )
    return [dumps[rank] for rank in sorted(dumps)]


def _plain(file: Path) -> Mapping[str, Any]:
    """Return the content of a file as plain data, whatever it is."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"diagnose: expected a file that can be read, got {error}.") from error
    if data.lstrip()[:1] == b"{":
        return load_json(data.decode("utf-8", "replace"), str(file))
    try:
        for count, (code, argument, _) in enumerate(pickletools.genops(data)):
            # An index far beyond the filled ones would allocate memory for all of them.
            beyond = code.name.endswith("PUT") and isinstance(argument, int) and argument > count
            if code.name not in _PLAIN or beyond:
                raise ValueError(f"the instruction {code.name} {argument!r:.60}")
        content = pickle.loads(data)  # noqa: S301 - nothing in it can name a class or a function
    except Exception as error:
        raise InvalidRecord(
            f"{file}: expected a dump of torch's flight recorder (a pickle of plain data, or JSON), got {type(error).__name__}: "
            f"{error}. It is damaged or another kind of file; nothing in it was executed."
        ) from error
    if not isinstance(content, dict):
        raise InvalidRecord(f"{file}: expected a dump of torch's flight recorder, got a {type(content).__name__}.")
    return content


def _dump(rank: int, content: Mapping[str, Any], where: str) -> Dump:
    version, entries = content.get("version"), content.get("entries")
    if not isinstance(version, str) or not version.startswith(_VERSION) or not isinstance(entries, list):
        got = f"version {version[:20]!r}" if isinstance(version, str) else "none"
        raise InvalidRecord(f"{where}: expected a dump of version 2 with entries, got {got}. Is this the right file?")
    first = entries[0].get("record_id") if entries and isinstance(entries[0], dict) else 0
    dump = Dump(rank, whole=first == 0)
    labels: dict[str, str] = {}
    config = content.get("pg_config")
    for name, facts in config.items() if isinstance(config, dict) else ():
        with suppress(Exception):  # unreadable members count as unknown members
            ranks = json.loads(facts["ranks"])
            # Gloo writes one entry without a name; its ranks are those of the last group made.
            if (
                isinstance(name, str)
                and name
                and ranks
                and all(type(member) is int and 0 <= member < 10**6 for member in ranks)
            ):
                labels[name] = label = _group(name, facts.get("desc"), ranks)
                dump.members[label] = tuple(ranks)
    for number, entry in enumerate(entries):
        try:
            _add(dump, entry, labels)
        except Exception as error:
            got = f"got {type(error).__name__}: {error}"
            raise InvalidRecord(f"{where}: entry {number}: expected a collective, {got}.") from error
    return dump


def _group(name: object, description: object, ranks: Sequence[int] = ()) -> str:
    if description == "default_pg" or name in ("0", "default_pg"):
        return "default group"
    # As the pool names it; torch gives groups of other ranks the same name.
    return f"group {str(name)[:40]!r}" + (f" of ranks {list(ranks)}" if ranks else "")


def _add(dump: Dump, entry: Mapping[str, Any], labels: Mapping[str, str]) -> None:
    backend, _, name = _text(entry["profiling_name"]).partition(":")
    # A collective that gloo has retired has completed or failed; gloo records no other state.
    pending = entry["state"] != "completed" and not (backend == "gloo" and entry.get("retired") is True)
    if entry.get("is_p2p"):
        dump.messages.extend([f"{name} at {_site(entry)}"] if pending else [])
        return
    name_of_group, description = map(_text, entry["process_group"])
    number, group = int(entry["collective_seq_id"]), labels.get(name_of_group) or _group(name_of_group, description)
    dtypes = [_text(dtype) for dtype in entry["input_dtypes"]]
    sizes = [[int(one) for one in size[:16]] for size in entry["input_sizes"]]
    outputs = [math.prod(int(one) for one in size[:16]) for size in entry["output_sizes"]]
    fixed: tuple[Any, ...] = (name,)
    if _EVEN.fullmatch(name):
        fixed = (name, sorted(set(dtypes)), list(map(math.prod, sizes)), outputs)
    shape = f" {','.join(dict.fromkeys(dtypes)).lower()}{sizes[0] if len(sizes) == 1 else sizes[:4]}" if sizes else ""
    what, before = f"{name}{shape}", dump.collectives.setdefault(group, {}).get(number)
    if before is not None:  # one that is made of several
        what, pending = f"{before.record.what} and {what}", pending or before.pending
        fixed = (before.record.signature, fixed)
    signature = int.from_bytes(hashlib.blake2b(repr(fixed).encode(), digest_size=8).digest(), "little")
    created = int(entry["time_created_ns"])
    if not 0 <= created < 2**63:
        raise ValueError(f"{str(created)[:20]} in place of a time in nanoseconds")
    record = CollectiveRecord(number, group, hash(group), what[:200], _site(entry), created, signature)
    dump.collectives[group][number] = Dumped(record, pending, created)


def _text(value: Any) -> str:
    # A list here may contain itself, or its text may not fit in memory.
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} in place of text")
    return value


def _site(entry: Mapping[str, Any]) -> str:
    """Return the innermost place in the user's own code, or a text that says it is unknown."""
    frames = [f"{_text(f['filename'])}:{int(f['line'])} in {_text(f['name'])}" for f in entry.get("frames", ())]
    own = [frame for frame in frames if not any(part in frame.partition(" in ")[0] for part in _LIBRARIES)]
    return next(iter(own or frames), "a place that the dump does not name")


@dataclass(frozen=True, slots=True)
class Lateness:
    """How much later than the first rank a rank reached the collectives that all members of a group hold.

    Attributes:
        rank: The rank.
        compared: Number of these collectives.
        mean: Mean seconds, by the clock of each host.
        most: The most seconds.
        where: The collective with the largest delay.
        last: The last collective that it issued.
    """

    rank: int
    compared: int
    mean: float
    most: float
    where: str
    last: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the dumps say.

    Attributes:
        sentences: The cause first.
        exit_code: 0 nothing is wrong, 1 ranks disagree, wait for each other or left no dump, 3 no verdict.
        ranks: How late each one came.
    """

    sentences: tuple[str, ...]
    exit_code: int
    ranks: tuple[Lateness, ...]


def diagnose(dumps: Sequence[Dump], world_size: int | None = None) -> Diagnosis:
    """Say who waits for whom.

    Args:
        dumps: Dumps of the ranks that left one.
        world_size: How many ranks there were; None for as many as the dumps name.
    """
    named = [rank for dump in dumps for ranks in dump.members.values() for rank in ranks]
    size = world_size or 1 + max([*named, *(dump.rank for dump in dumps)])
    ranks = _Ranks({dump.rank: dump for dump in dumps}, size)
    absent = sorted(set(range(size)) - set(ranks.dumps))
    wrong = [*ranks.differences(), *ranks.waits()]
    if absent:
        wrong.append(f"{rank_names(absent)} left no dump: a rank that died, or that could not write one")
    open_ = [] if wrong else [*ranks.pending(), *ranks.behind()]
    compared = ranks.compared()
    if not wrong and not open_ and not compared:
        open_ = ["nothing that two ranks hold can be compared"]
    lines = wrong or open_ or [f"{size} ranks hold the same collectives, and none is pending"]
    return Diagnosis(tuple(lines), 1 if wrong else 3 if open_ else 0, tuple(_late(dump, compared) for dump in dumps))


class _Ranks:
    def __init__(self, dumps: Mapping[int, Dump], size: int) -> None:
        self.dumps = dumps
        self.groups: dict[str, tuple[int, ...]] = {}
        for dump in dumps.values():
            self.groups.update(dump.members)
        for group in sorted({group for dump in dumps.values() for group in dump.collectives} - set(self.groups)):
            users = tuple(rank for rank, dump in dumps.items() if group in dump.collectives)
            self.groups[group] = tuple(range(size)) if group == "default group" else users

    def differences(self) -> list[str]:
        """Return the sentence on the first collective that differs, as the pool says it."""
        keys = {hash(group): members for group, members in self.groups.items()}
        outcomes = []
        for rank, dump in self.dumps.items():
            records = tuple(one.record for one in dump.records)
            outcomes.append(RankOutcome(rank, Fate.STOPPED, collectives=records, digests=dict.fromkeys(keys, rank)))
        difference = first_difference(outcomes, keys)
        return [difference.sentence()] if difference is not None else []

    def _missing(self, group: str, number: int) -> list[int]:
        """Return the members whose dumps do not show the collective."""
        members = [self.dumps[rank] for rank in self.groups[group] if rank in self.dumps]
        known = [dump for dump in members if dump.whole or group in dump.collectives]
        return [dump.rank for dump in known if max(dump.collectives.get(group, ()), default=0) < number]

    def waits(self) -> list[str]:
        """Return a sentence on each collective in which ranks wait; first those that miss a rank which does not wait itself."""
        waiting: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for rank, dump in self.dumps.items():
            for one in [one for one in dump.records if one.pending]:
                group = one.record.group
                gone = [member for member in self.groups[group] if member not in self.dumps]
                awaited = tuple(sorted([*self._missing(group, one.record.number), *gone]))
                if awaited:
                    waiting.setdefault((_placed(one.record), awaited), []).append(rank)
                    break
        stuck = {rank for ranks in waiting.values() for rank in ranks}
        order = sorted(waiting, key=lambda wait: stuck.issuperset(wait[1]))
        circle = "ranks wait for each other, for example because groups are used in opposite order: "
        return [
            f"{circle if place == 0 and stuck.issuperset(awaited) else ''}{rank_names(waiting[what, awaited])} "
            f"{'waits' if len(waiting[what, awaited]) == 1 else 'wait'} in {what}; {self._never_joined(awaited)}"
            for place, (what, awaited) in enumerate(order)
        ]

    def _never_joined(self, ranks: Sequence[int]) -> str:
        clauses = []
        for rank in ranks:
            records = self.dumps[rank].records if rank in self.dumps else []
            last = f"it last issued {_placed(records[-1].record)}" if records else "it issued no collective"
            clauses.append(f"rank {rank} never joined it: {last if rank in self.dumps else 'it left no dump'}")
        return "; ".join(clauses)

    def pending(self) -> Iterator[str]:
        """Describe pending messages, and collectives that are pending although every member has issued them."""
        under_way: dict[str, list[int]] = {}
        for rank, dump in self.dumps.items():
            for what in [*dump.messages, *(_placed(one.record) for one in dump.records if one.pending)][:1]:
                under_way.setdefault(what, []).append(rank)
        for what, ranks in under_way.items():
            yield (
                f"{rank_names(ranks)}: {what} is pending on every member: a slow network or device, or a run that "
                f"still makes progress"
            )

    def behind(self) -> Iterator[str]:
        """Name the ranks that issued fewer collectives of a group although no rank is seen to wait."""
        for group in self.groups:
            most = max(
                (number for dump in self.dumps.values() for number in dump.collectives.get(group, ())), default=0
            )
            if behind := self._missing(group, most):
                yield f"#{most} of the {group} is pending in no dump, but {self._never_joined(behind)}"

    def compared(self) -> list[dict[int, Dumped]]:
        """Return each collective that all members of its group hold, by rank."""
        held = []
        for group, members in self.groups.items():
            numbers = {rank: self.dumps[rank].collectives.get(group, {}) for rank in members if rank in self.dumps}
            common = set.intersection(*map(set, numbers.values())) if len(numbers) > 1 else set()
            held += [{rank: of[number] for rank, of in numbers.items()} for number in sorted(common)]
        return held


def _late(dump: Dump, compared: Sequence[Mapping[int, Dumped]]) -> Lateness:
    mine = [one for one in compared if dump.rank in one]
    late = [(one[dump.rank].created_ns - min(other.created_ns for other in one.values())) / 1e9 for one in mine]
    last = dump.records[-1].record if dump.records else None
    if not late:
        return Lateness(dump.rank, 0, 0.0, 0.0, "", str(last or ""))
    where = mine[late.index(max(late))][dump.rank].record
    return Lateness(dump.rank, len(late), sum(late) / len(late), max(late), f"{where} at {where.call_site}", str(last))


def _placed(record: CollectiveRecord) -> str:
    return f"{record} at {record.call_site}"
