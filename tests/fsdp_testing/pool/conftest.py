"""A pool for all tests of this folder, whose cache is not the user's; its programs can be imported here and in ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_testing.pool import Pool

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_TESTING_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def pool(cache: Path) -> Iterator[Pool]:
    # Ranks import the test modules, which import pytest.
    pool = Pool(preload_modules=("pytest",))
    yield pool
    pool.close()
