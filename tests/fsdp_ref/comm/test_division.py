"""The two divisors of a mean."""

from __future__ import annotations

import pytest

from fsdp_ref.comm.division import DivideFactors

TABLE = {1: 1, 2: 2, 3: 2, 4: 2, 5: 2, 6: 4, 8: 4, 9: 2, 16: 4, 64: 8, 256: 16}


@pytest.mark.covers("RED-01", "B052")
@pytest.mark.parametrize(("world", "before"), TABLE.items())
def test_the_known_factors(world, before):
    factors = DivideFactors.for_world(world)
    assert factors == DivideFactors(float(before), world / before)


@pytest.mark.covers("RED-01")
def test_their_product_is_the_world_size_and_neither_strays_far_from_its_root():
    for world in range(1, 2000):
        factors = DivideFactors.for_world(world)
        assert factors.before * factors.after == world
        assert factors.before <= 2 * world**0.5
