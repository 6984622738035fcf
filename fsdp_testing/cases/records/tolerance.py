"""How far two correct computations of the same quantity may be apart.

Every bound is derived from the number of roundings that separate the two and is printed with its derivation. The
model is the usual first-order one (Higham, "Accuracy and Stability of Numerical Algorithms", chapter 3): a quantity
that is computed by k roundings of relative size u each, from terms of magnitude m, is off by at most k*u*m.
"""

from __future__ import annotations

from dataclasses import dataclass

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance from 1 to the next number, by dtype name."""

UNDERFLOW = {"float64": 2.0**-1074, "float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
"""Half the smallest positive number (for float64 that number itself): what rounding a number near 0 may be off."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound on an absolute error, with its derivation.

    Attributes:
        value: The bound; 0 demands equal bits.
        derivation: How it came about, for the report.
    """

    value: float
    derivation: str


EXACT = Bound(0.0, "bitwise: both sides do the same roundings in the same order")


def rounding_bound(dtype: str, roundings: float, magnitude: float, what: str = "") -> Bound:
    """Return the bound for `roundings` roundings in `dtype` of terms as large as `magnitude`."""
    unit = UNIT_ROUNDOFF[dtype]
    note = f" ({what})" if what else ""
    return Bound(
        roundings * unit * magnitude,
        f"{roundings:.6g} roundings x u({dtype})={unit:.3g} x magnitude {magnitude:.3g}{note}",
    )
