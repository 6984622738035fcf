"""Where do the random numbers of a case come from? Each from a seed made of the case's seed and what it is for."""

from __future__ import annotations

import hashlib


def derive(*parts: int | str) -> int:
    """Returns a seed (63 bits) that is a function of `parts` alone, on every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
