"""A recorded case, run again: read from any file that holds one, run on new processes, compared by its bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.base.document import load_json
from fsdp_testing.cases.drawing import legal_case, needs_of_case
from fsdp_testing.cases.models.tree_schema import check_case_with_tree
from fsdp_testing.cases.records import Case, RankObservation, RunReport, outcome
from fsdp_testing.checks.findings import discovery
from fsdp_testing.errors import InvalidArgument, InvalidRecord
from fsdp_testing.judging import record_stream
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.ranks.pool import Pool

Judge = Callable[[CaseRunner, Adapter, Case], JudgedCase]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A case from a file, with its implementation and check if the file names them."""

    case: Case
    implementation: str = ""
    check: str = ""


def read_recorded(path: Path) -> list[Recorded]:
    """Return every case in a file: a case, a finding of a campaign, or the failures of a report.

    Raises:
        InvalidRecord: The file is damaged, newer than this version, or has no legal case.
        InvalidArgument: It cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: expected a readable text file, got {error}. Give a case or finding.") from error
    data = load_json(text, str(path))
    if data.get("format") == discovery.FORMAT.name:
        recorded = discovery.Discovery.from_json(text, str(path))
        return [Recorded(_checked(recorded.case, path), recorded.implementation)]
    if data.get("format") == outcome.FORMAT.name:
        report = RunReport.from_json(text, str(path))
        if faults := report.environment.get("faults"):
            raise InvalidArgument(
                f"{path}: expected the report of a run without injected faults, got one with {faults}: a case alone has none. "
                f"Run the checks again, with --fault {faults}."
            )
        cases = [
            Recorded(finding.case, result.implementation, result.check)
            for result in report.results
            for finding in result.findings
        ]
        for met in cases:
            check_case_with_tree(met.case, str(path))
        if not cases:
            raise InvalidRecord(
                f"{path}: expected a report with failures, got one without. There is nothing to replay."
            )
        return cases
    return [Recorded(_checked(Case.from_json(data, str(path)), path))]


def _checked(case: Case, path: Path) -> Case:
    """Return a case that runs exactly as written; refuse a case with parts that would be dropped."""
    check_case_with_tree(case, str(path))
    legal = legal_case(case)
    if legal != case:
        where = "model.tree" if legal.model != case.model else "wrapping, program or world"
        raise InvalidRecord(
            f"{path}.{where}: expected a legal case, got parts without effect. "
            f"The nearest legal case is {legal.to_json()}"
        )
    return case


def check_claims(case: Case, adapter: Adapter) -> None:
    """Raise InvalidArgument if the implementation does not claim what the case asks for; every tag is named."""
    missing = sorted(needs_of_case(case) - adapter.capabilities - {"nested_wrapping"})
    if missing:
        raise InvalidArgument(
            f"{adapter.name}: expected claims for everything that the case needs, got none for {', '.join(missing)}. "
            "A check that is not claimed is not judged; name another implementation."
        )


def replay(
    pool: Pool, adapter: Adapter, case: Case, deadline: float = 30.0, check: Judge | None = None
) -> tuple[JudgedCase, str]:
    """Run one case on a pool of its own and judge it.

    Args:
        pool: The pool to run on.
        adapter: The implementation.
        case: The case to run.
        deadline: Seconds until a rank counts as hung.
        check: How a check judges it, if the check judges more than the numbers of the case.

    Returns: The result, and a digest of every bit that every rank reported; empty if a rank was lost.
    """
    if check is not None:
        judged = check(CaseRunner(pool, timeout=deadline), adapter, case)
        return judged, _digest_of(judged.ranks if len(judged.ranks) == case.world.size else ())
    digests: list[str] = []
    (judged,) = CaseRunner(pool, timeout=deadline).judge_batch(
        adapter,
        [case],
        Watch(operations=True, models=True),
        on_records=lambda folder: digests.append(_digest(folder, case.world.size)),
    )
    return judged, digests[-1]


def _digest(directory: str, size: int) -> str:
    records = [record_stream.read(directory, rank)[:1] for rank in range(size)]
    return _digest_of([of_rank[0].observation for of_rank in records] if all(records) else [])


def _digest_of(ranks: Sequence[RankObservation]) -> str:
    if not ranks:
        return ""
    total = hashlib.sha256()
    for seen in ranks:
        error = seen.error
        # Leave out the text of exceptions, which may contain an address.
        for part in _parts((seen.results, seen.snapshots, (error.index, error.type_name) if error else None)):
            total.update(part)
    return total.hexdigest()[:16]


def _parts(value: Any) -> Iterator[bytes]:
    """Yield every bit of a record: tensors as stored in memory, mappings in the order of their keys."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        yield repr((tuple(value.shape), str(value.dtype))).encode()
        yield bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""
    elif isinstance(value, Mapping):
        yield from _parts([*sorted(value), *(value[key] for key in sorted(value))])
    elif isinstance(value, (tuple, list)):
        yield from (part for item in (len(value), *value) for part in _parts(item))
    elif is_dataclass(value):
        yield from _parts([getattr(value, item.name) for item in fields(value)])
    else:
        yield repr(value).encode()
