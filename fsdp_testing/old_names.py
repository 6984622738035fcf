"""Modules that moved: an import of the old name gives the new module, with a warning that names it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Sequence

ROOMS = {
    "backends": "base.backends",
    "campaign": "search.campaign",
    "campaign.investigation": "search.investigation",
    "campaign.merging": "search.merging",
    "campaign.rerun": "checks.findings.rerun",
    "campaign.state": "search.state",
    "certificate": "search.certificate",
    "certificate.merging": "search.merging",
    "certificate.verdicts": "search.state",
    "checkers": "judging.checkers",
    "checkers.assemble": "oracle.assemble",
    "checkers.comparison": "oracle.quantities",
    "checkers.gathered_state": "oracle.assemble",
    "checkers.quantities": "oracle.quantities",
    "checkers.tensors": "oracle.tensors",
    "checkpoints": "search.checkpoints",
    "compat": "base.compat",
    "conformance": "checks.conformance",
    "documentation": "base.documentation",
    "env": "base.env",
    "explanation": "explain",
    "findings": "checks.findings",
    "findings.tags": "judging.tags",
    "checks.findings.tags": "judging.tags",
    "implementations": "adapters",
    "ledger": "ranks.ledger",
    "model_check": "train",
    "operations": "cases.operations",
    "oracle.comparison": "oracle.quantities",
    "oracle.gathered_state": "oracle.assemble",
    "pool": "ranks.pool",
    "programs": "oracle",
    "pytest_plugin": "plugin",
    "records": "cases.records",
    "records.dirt": "ranks.pool.outcome",
    "records.document": "base.document",
    "records.printable": "base.printable",
    "run": "ranks.run",
    "script_check": "train",
    "shrinking": "explain.shrinking",
    "strategies": "cases.drawing",
    "streams": "ranks.streams",
    "suites": "checks.suites",
    "test_classes": "plugin.test_classes",
    "trace": "explain.trace",
    "training_check": "train",
    "zoo": "cases.models",
}
"""Old name to new, below `fsdp_testing`."""


def new_name(name: str) -> str | None:
    """Return today's full name of the module that was called `name`; None where it never had another."""
    head, _, rest = name.partition(".")
    if head != __package__:
        return None
    parts = rest.split(".")
    for length in (3, 2, 1):
        room = ROOMS.get(".".join(parts[:length]))
        if room is not None and len(parts) >= length:
            return ".".join((head, room, *parts[length:]))
    return None


class OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes first: a package under its old name has today's folder, in which others would find its modules a second time."""

    def __init__(self) -> None:
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for an old name whose new module exists."""
        new = new_name(name)
        if new is None or importlib.util.find_spec(new) is None:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=new)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the module of the new name itself: classes are the same whichever name imported them."""
        assert spec.origin is not None
        said = f"{spec.name} is now {spec.origin}: import that, the old name will go."
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        module = importlib.import_module(spec.origin)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Give the module its own spec back, which the import of the old name has replaced."""
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = self._specs.pop(spec.name)


def install() -> None:
    """Make old names importable, once in a process."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldNames())
