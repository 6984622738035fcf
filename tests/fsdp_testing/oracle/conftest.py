"""Makes the broken adapters importable by name, here and in every rank (ranks take over `sys.path`)."""

from __future__ import annotations

import sys
from pathlib import Path

BROKEN = str(Path(__file__).parents[2] / "quality" / "broken")

if BROKEN not in sys.path:
    sys.path.insert(0, BROKEN)
