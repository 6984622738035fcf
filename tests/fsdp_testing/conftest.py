"""Makes the broken adapters and the small cases importable, here and in every rank (ranks take over `sys.path`)."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent

for folder in map(
    str,
    (
        *(HERE / room for room in ("search/campaign", "search/certificate", "search/checkpoints", "cases/operations")),
        HERE.parent / "quality" / "broken",
    ),
):
    if folder not in sys.path:
        sys.path.insert(0, folder)
