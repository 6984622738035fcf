"""What a check has compared. Read by every checker that compares states; it decides nothing itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a check asks of a comparison.

    Attributes:
        lockstep: The oracle starts each operation from the implementation's own state, and bounds are those of one
            operation; else it runs freely.
        none_is_zero: A gradient of zeros may stand for None and the other way round.
        gradients: Compare gradients.
        optimizer: Compare optimizer state, where the implementation shows it.
        buffers: Compare buffers.
        outputs: Compare losses, outputs and norms.
        ignore: Parameters (fnmatch patterns) that are not compared, such as those outside the implementation.
    """

    lockstep: bool = False
    none_is_zero: bool = False
    gradients: bool = True
    optimizer: bool = True
    buffers: bool = True
    outputs: bool = True
    ignore: tuple[str, ...] = ()
