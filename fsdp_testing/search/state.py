"""The state of one search on disk: a verdict on every case that ran, so that the next run continues where this one ended.

One document for every source of cases. A source numbers its cases; the document has one letter for each number. A pass is
recorded explicitly: a number without a verdict says nothing, whatever else is lost. The file is written completely or not at
all, so an interruption at any moment leaves the old or the new content.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import torch

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.base.document import ADDED_LATER, Format, decode, load_json, read_text
from fsdp_testing.cases.records import FailureKind, Verdict
from fsdp_testing.errors import InvalidArgument, InvalidRecord
from fsdp_testing.judging.signature import Signature
from fsdp_testing.report.files import write_atomically

FORMAT = Format("fsdp_testing/search_state", 1)
SOURCE = "source"
"""Name of the entry in a subject for the digest of the implementation's text and of the harness that judges it."""
_OF_EARLIER_VERSIONS = ("fsdp_testing/fuzz_state", "fsdp_testing/certificate_state")
LOCK_FILE = "lock"
_ADVICE = "Give another --state directory, or remove that one to start over."

_LETTERS = {"p": Verdict.PASS, "f": Verdict.FAIL, "u": Verdict.UNKNOWN, "e": Verdict.EXPECTED_FAILURE}
_LETTER_OF = {verdict: letter for letter, verdict in _LETTERS.items()}
OPEN = "."
"""The letter of a case without a verdict."""
FORMER = "-"
"""The letter of a case that ran on another subject: it is not run again, and has no verdict."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a case does not pass.

    Attributes:
        text: The first fact that differs, or why there is no verdict.
        looks: Kind, quantity and operation of a failure, else empty.
        confirmed: It failed in the same way again, alone.
        refused: The implementation refuses the case with an error.
    """

    text: str
    looks: tuple[str, ...] = ()
    confirmed: bool = False
    refused: bool = field(default=False, metadata=ADDED_LATER)

    @property
    def signature(self) -> Signature | None:
        return Signature(FailureKind(self.looks[0]), *self.looks[1:]) if self.looks else None


@dataclass(frozen=True, slots=True)
class State:
    """The results of a search, over all its runs.

    Attributes:
        subject: The subject of its verdicts, by name: implementation, versions, digests, settings of its cases.
        shard: `(i, n)`: its cases are the i-th of n parts, numbered from 0 within the part.
        verdicts: One letter for each case, by number.
        reasons: Why cases do not pass, by number; a source may keep that elsewhere.
        variants: Verdicts on cases without a number: variants without the cause of a known failure.
        known: How many cases failed by each known failure.
        not_investigated: Cases that failed like others, and were not investigated.
        suspects: Numbers of cases that failed, or whose variant failed, and that were not yet investigated when the run ended.
        suspect_variants: How many failed variants were not yet investigated.
        found: Names of its findings, each a folder beside it.
        listed: How many cases the whole search has, all parts together; 0 if open-ended.
        turns: In which run the example of each known failure ran last, the first run being 0.
        runs: Runs so far.
        seconds: Time spent.
    """

    subject: Mapping[str, str]
    shard: tuple[int, int] = (1, 1)
    verdicts: str = ""
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    variants: Mapping[str, int] = field(default_factory=dict)
    known: Mapping[str, int] = field(default_factory=dict)
    not_investigated: int = 0
    suspects: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)
    suspect_variants: int = field(default=0, metadata=ADDED_LATER)
    found: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)
    listed: int = field(default=0, metadata=ADDED_LATER)
    turns: Mapping[str, int] = field(default_factory=dict)
    runs: int = 0
    seconds: float = 0.0

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Return the numbers of the cases without a verdict."""
        return tuple(number for number, letter in enumerate(self.verdicts) if letter == OPEN)

    def reopened(self) -> State:
        """Return the state for the next run: suspects run again, because they fail and were not investigated."""
        letters = list(self.verdicts)
        for number in self.suspects:
            letters[number] = OPEN
        failing = Counter({Verdict.FAIL.value: self.suspect_variants})
        return replace(
            self,
            verdicts="".join(letters),
            reasons={number: why for number, why in self.reasons.items() if int(number) not in self.suspects},
            variants=Counter(self.variants) - failing,
            suspects=(),
            suspect_variants=0,
        )

    def counts(self) -> Counter[Verdict]:
        """Return how many cases have each verdict, variants included."""
        return counts_of(self.verdicts) + Counter({Verdict(word): count for word, count in self.variants.items()})


def counts_of(letters: str) -> Counter[Verdict]:
    """Return how many cases have each verdict."""
    return Counter({verdict: count for letter, verdict in _LETTERS.items() if (count := letters.count(letter))})


class Verdicts:
    """The verdicts of a search while it runs, by number of the case; for one thread.

    Args:
        letters: The verdicts, as in a state.
        reasons: The reasons, as in a state.
    """

    def __init__(self, letters: str = "", reasons: Mapping[int, Reason] | None = None) -> None:
        self._letters = bytearray(letters, "ascii")
        self.reasons = dict(reasons or {})

    def __len__(self) -> int:
        return len(self._letters)

    def __getitem__(self, number: int) -> Verdict | None:
        """Return the verdict on a case; None as long as it has none."""
        return _LETTERS.get(chr(self._letters[number]))

    @property
    def letters(self) -> str:
        """Return one letter for each case, as in a state."""
        return self._letters.decode("ascii")

    def add_case(self) -> int:
        """Return the number of one more case, which has no verdict yet."""
        self._letters.append(ord(OPEN))
        return len(self._letters) - 1

    def take(self, number: int, verdict: Verdict, reason: Reason | None = None) -> None:
        """Record the verdict on a case, and the reason if it does not pass; this replaces any earlier verdict."""
        self._letters[number] = ord(_LETTER_OF[verdict])
        self.reasons.pop(number, None)
        if reason is not None:
            self.reasons[number] = reason

    def numbers(self, verdict: Verdict | None) -> list[int]:
        """Return the numbers of the cases with a verdict, or of those without one."""
        letter = OPEN if verdict is None else _LETTER_OF[verdict]
        return [number for number, other in enumerate(self.letters) if other == letter]

    def counts(self) -> Counter[Verdict]:
        return counts_of(self.letters)


# ----------------------------------------------------------------------------------------------- on disk


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Lock a state directory against other processes. Without the lock the last writer wins, and verdicts of the other are lost.

    Raises:
        InvalidArgument: Another process uses it, or it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        opened = (directory / LOCK_FILE).open("a")
    except OSError as error:
        raise InvalidArgument(
            f"--state {directory}: expected a directory that can be made and written, got {error}. Name another."
        ) from error
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidArgument(
                f"--state {directory}: expected a directory that no other process uses, got one in use. Name another, or wait. "
                "To divide the work, give each process a --shard and a directory of its own."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


def read_state(file: Path) -> State:
    """Read what `write_state` wrote.

    Raises:
        InvalidRecord: The file is not there, damaged, or of an earlier or newer version.
    """
    where = str(file)
    data = load_json(
        read_text(file, "the state of a search", "Give the --state directory of `fuzz` or `certify`."), where
    )
    if data.get("format") in _OF_EARLIER_VERSIONS:
        raise InvalidRecord(
            f"{where}: expected a verdict on every case, got a state of an earlier version, which has none. {_ADVICE}"
        )
    state = decode(State, FORMAT.read(data, where), where)
    strange = sorted(set(state.verdicts) - {*_LETTERS, OPEN, FORMER})
    if strange:
        raise InvalidRecord(f"{where}.verdicts: expected letters of {''.join(_LETTERS)}, got {strange}. {_ADVICE}")
    for number, reason in state.reasons.items():
        if not number.isdecimal() or len(number) > 12 or int(number) >= len(state.verdicts):
            raise InvalidRecord(f"{where}.reasons: expected numbers of its cases, got {number!r}. {_ADVICE}")
        try:
            reason.signature  # noqa: B018 - looks that are none raise
        except (ValueError, TypeError) as error:
            raise InvalidRecord(
                f"{where}.reasons.{number}.looks: expected what a failure looks like, got {reason.looks} ({error}). {_ADVICE}"
            ) from error
    strangers = [number for number in state.suspects if not 0 <= number < len(state.verdicts)]
    if strangers:
        raise InvalidRecord(f"{where}.suspects: expected numbers of its cases, got {strangers}. {_ADVICE}")
    words = sorted(set(state.variants) - {verdict.value for verdict in _LETTER_OF})
    if words:
        raise InvalidRecord(f"{where}.variants: expected verdicts, got {words}. {_ADVICE}")
    return state


def write_state(file: Path, state: State) -> None:
    """Write a state, completely or not at all."""
    write_atomically(file, FORMAT.write(state), option="--state")


def changes(subject: Mapping[str, str], state: State, shard: tuple[int, int] = (1, 1)) -> dict[str, str]:
    """Return how a state differs from the current settings, by name, in words."""
    wrong = {
        name: f"{name}: expected {subject.get(name, 'nothing')!r}, got {state.subject.get(name, 'nothing')!r}"
        for name in {**subject, **state.subject}
        if subject.get(name) != state.subject.get(name)
    }
    if SOURCE in wrong:
        wrong[SOURCE] += ", because the implementation or fsdp-testing has changed since"
    if state.shard != shard:
        wrong["part"] = "part: expected {} of {}, got {} of {}".format(*shard, *state.shard)
    return wrong


def refuse(file: Path, wrong: Mapping[str, str]) -> None:
    """Refuse a state of another subject or part.

    Raises:
        InvalidRecord: Anything differs.
    """
    if wrong:
        what = "; ".join(wrong.values())
        raise InvalidRecord(f"{file}: {what}. Its earlier results belong to another run. {_ADVICE}")


def refuse_changed(subject: Mapping[str, str], source: str) -> None:
    """Refuse to save verdicts if the source has changed: new ranks read it again, so they may have run other code.

    Raises:
        InvalidArgument: The source has changed.
    """
    if subject.get(SOURCE) != source:
        raise InvalidArgument(
            "source: expected no change during the run, got a change of the implementation or of fsdp-testing. "
            "Verdicts since the last save are lost. Run it again."
        )


_ALWAYS = ("fsdp_testing", "fsdp_ref")
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_IMPORT = re.compile(rb"(?:^|[;:])[ \t]*(?:from|import)[ \t]+([\w., \t]+)", re.MULTILINE)
_IMPORT_BY_NAME = re.compile(rb"(?:import_module|__import__)\(\s*[\"']([\w.]+)[\"']")


def source_digest(adapter: Adapter) -> str:
    """Return a digest that changes with the text of the implementation, of what it imports, or of the harness.

    The text is that of all Python files of its adapter's package, of this package, and of every package or module that is not
    installed and that these import, also inside functions. Installed packages count by their version.
    """
    total = hashlib.sha256(f"torch {torch.__version__}".encode())
    own = [module.partition(".")[0] for module in registry.modules_of(adapter.reference) if module]
    seen: set[str] = set()
    todo = [*own, *_ALWAYS]
    while todo:
        name = todo.pop(0)
        if name in seen or name == "torch" or name in sys.stdlib_module_names:
            continue
        seen.add(name)
        place = _place(name)
        if place is None or (name not in (*own, *_ALWAYS) and _INSTALLED & set(place.parts)):
            total.update(f"\n{name} {_version(name)}\n".encode())
            continue
        imported: set[str] = set()
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            text = file.read_bytes()
            total.update(f"\n{file.relative_to(place.parent)}\n".encode() + text)
            imported.update(_imported(text) if name not in _ALWAYS else ())
        todo += sorted(imported)
    return total.hexdigest()[:16]


def _place(name: str) -> Path | None:
    """Return folder or file of a package or module; None if it does not exist or is not Python text."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is not None and spec.origin is None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))  # a package without `__init__.py`
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    file = Path(spec.origin)
    return file.parent if file.name == "__init__.py" else file


def _imported(text: bytes) -> Iterator[str]:
    lines = re.sub(rb"\\\r?\n", b" ", text)
    for found in (*_IMPORT.finditer(lines), *_IMPORT_BY_NAME.finditer(lines)):
        for name in found[1].decode().split(" import ")[0].split(","):
            top = name.strip().partition(" ")[0].partition(".")[0]
            if top.isidentifier():
                yield top


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
