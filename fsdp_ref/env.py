"""Which environment variables change what the reference does?

The five of torch's FSDP, read here and nowhere else, each time a unit is built (never at import). Two of them make
training wrong by design; they exist to measure what communication costs, and say so on every use.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Switches:
    """The switches as they stood when a unit was built.

    Attributes:
        unsafe_setattr: put parameters on modules without going through an overridden ``__setattr__``
            (``FSDP_USE_UNSAFE_SETATTR``).
        skip_writeback: ignore parameters and gradients that the user replaced
            (``FSDP_SKIP_WRITEBACK_CHECK``).
        full_precision_in_eval: modules in eval mode compute in full precision (``FSDP_USE_FULL_PREC_IN_EVAL``).
        fake_all_gather: gather nothing, training is wrong (``FSDP_USE_FAKE_ALL_GATHER``).
        fake_reduce: reduce nothing, training is wrong (``FSDP_USE_FAKE_REDUCE``).
    """

    unsafe_setattr: bool = False
    skip_writeback: bool = False
    full_precision_in_eval: bool = False
    fake_all_gather: bool = False
    fake_reduce: bool = False


def read_switches() -> Switches:
    """Read the five variables; each is on when it is exactly ``1``. Those that make training wrong warn each time."""
    fake = [name for name in ("FSDP_USE_FAKE_ALL_GATHER", "FSDP_USE_FAKE_REDUCE") if _on(name)]
    if fake:
        warnings.warn(
            f"{' and '.join(fake)} set: nothing is communicated and training is wrong. Unset for anything but measuring.",
            UserWarning,
            stacklevel=4,
        )
    return Switches(
        unsafe_setattr=_on("FSDP_USE_UNSAFE_SETATTR"),
        skip_writeback=_on("FSDP_SKIP_WRITEBACK_CHECK"),
        full_precision_in_eval=_on("FSDP_USE_FULL_PREC_IN_EVAL"),
        fake_all_gather=_on("FSDP_USE_FAKE_ALL_GATHER"),
        fake_reduce=_on("FSDP_USE_FAKE_REDUCE"),
    )


def local_world_size() -> int | None:
    """Return how many ranks the launcher started on this host, None when no launcher said."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdigit() and int(value) > 0 else None


def _on(name: str) -> bool:
    return os.environ.get(name, "") == "1"
