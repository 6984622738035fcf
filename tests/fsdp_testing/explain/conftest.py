"""The planted faults of tests/quality are importable by name, here and in every rank (ranks take over `sys.path`)."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent

for folder in (str(HERE.parents[1] / "quality" / "broken"), str(HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)
