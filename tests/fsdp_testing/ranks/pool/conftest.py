"""A pool for all tests of this folder; its programs can be imported here and in ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_testing.ranks.pool import Pool

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    # Ranks import the test modules, which import pytest.
    pool = Pool(preload_modules=("pytest",))
    yield pool
    pool.close()
