"""Environment variables that change what the reference does; read here and nowhere else."""

from __future__ import annotations

import os


def full_precision_in_eval() -> bool:
    """Return whether modules in eval mode compute in full precision (``FSDP_USE_FULL_PREC_IN_EVAL``, when it is ``1``).

    Read each time a unit is built, never at import.
    """
    return os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL", "") == "1"


def local_world_size() -> int | None:
    """Return how many ranks the launcher started on this host, None when no launcher said."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdigit() and int(value) > 0 else None
