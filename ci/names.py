"""Write the names of checks and models for `fsdp-verify list`, which does not wait for torch: `python ci/names.py`."""

from __future__ import annotations

import json
from pathlib import Path

from fsdp_testing.cases.models import MODELS
from fsdp_testing.checks.suites import CHECKS

TARGET = Path(__file__).parents[1] / "fsdp_testing" / "cli" / "names.json"


def names() -> dict[str, object]:
    """Return the names that the package has now."""
    suites: dict[str, list[str]] = {}
    for check in CHECKS:
        suite, _, name = check.partition(".")
        suites.setdefault(suite, []).append(name)
    return {"checks": suites, "models": list(MODELS)}


if __name__ == "__main__":
    TARGET.write_text(json.dumps(names(), indent=0, separators=(",", ":")) + "\n", encoding="utf-8")
