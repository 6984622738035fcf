"""What one rounding may do: every bound is derived from the number of them that separate two correct computations.

The model is the usual first-order one (Higham, "Accuracy and Stability of Numerical Algorithms", chapter 3): a quantity
that is computed by k roundings of relative size u each, from terms of magnitude m, is off by at most k*u*m.
"""

from __future__ import annotations

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance from 1 to the next number, by dtype name."""

UNDERFLOW = {"float64": 2.0**-1074, "float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
"""Half the smallest positive number (for float64 that number itself): what rounding a number near 0 may be off."""
