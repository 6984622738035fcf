"""Makes the faults of this folder importable by name, here and in every rank (ranks take over `sys.path`)."""

from __future__ import annotations

import sys
from pathlib import Path

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))
