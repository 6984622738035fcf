"""The controller's book of worlds: which world runs a test, what the world has received, which fixtures live in it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from fsdp_testing.errors import HarnessError
from fsdp_testing.plugin import pytest_compat
from fsdp_testing.plugin.marker import WorldRequest
from fsdp_testing.plugin.rank_template import encode
from fsdp_testing.plugin.records import RankResult
from fsdp_testing.plugin.selection import defaults_of, shared_length
from fsdp_testing.plugin.session_spec import session_spec
from fsdp_testing.ranks.pool import Pool, PooledWorld, WorldOutcome, default_pool
from fsdp_testing.ranks.pool.outcome import left_behind

IN_RANK = "fsdp_testing.plugin.in_rank"
_TEMPLATE = "fsdp_testing.plugin.rank_template"
_END_SECONDS = 10.0


class Leases:
    """Lends worlds to tests and remembers what lives in them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._spec: bytes | None = None
        self._pool: Pool | None = None
        # Weak: the pool may end a world unnoticed, and a new world may get its id.
        self._informed: WeakKeyDictionary[PooledWorld, str] = WeakKeyDictionary()
        self._kept: dict[PooledWorld, list[Any]] = {}
        self._problems: list[str] = []
        self._left: list[str] = []

    def start(self) -> Pool:
        """Begin to start the fork server, without waiting: collection goes on meanwhile."""
        if self._pool is None:
            self._pool = default_pool()
            self._pool.coverage = coverage_settings()
            # Of a worker of pytest-xdist.
            self._pool.run = getattr(self._config, "workerinput", {}).get("testrunuid", "")
            self._pool.add_preload(IN_RANK)
            self._pool.add_preparation(f"{_TEMPLATE}:prepare", encode(self._description()))
            self._pool.start()
        return self._pool

    def lend(self, request: WorldRequest) -> PooledWorld:
        """Return a world for one test; the caller gives it back."""
        world = self.start().world(request.size, request.backend, request.isolation)
        if request.rank is not None:
            world.at(request.rank)
        return world

    def introduction(self, world: PooledWorld) -> tuple[bytes | None, str]:
        """Return what a world needs for a job: the session's description the first time, and its directory."""
        known = self._informed.get(world)
        if known is not None:
            return None, known
        directory = self._informed[world] = str(pytest_compat.new_directory(self._config, f"world{world.key.size}-"))
        if world.reusable:
            world.before_leaving.append(self._end_session)
        return self._description(), directory

    def _description(self) -> bytes:
        if self._spec is None:
            self._spec = pickle.dumps(
                session_spec(self._config, str(pytest_compat.new_directory(self._config, "empty-")))
            )
        return self._spec

    def note(self, world: PooledWorld, chain: list[Any], outcome: WorldOutcome) -> None:
        """Remember which nodes of `chain` have fixtures that live in `world` after a job."""
        kept = chain[: max((value.kept for value in outcome.values if isinstance(value, RankResult)), default=0)]
        if kept and world.trusted:
            self._kept[world] = kept
        else:
            self._kept.pop(world, None)

    def leave_what_is_not_shared(self, nextitem: pytest.Item | None) -> None:
        """End fixtures that live in ranks and that the next item does not share."""
        if not self._kept:
            return
        wanted = nextitem.listchain() if nextitem is not None else []
        for world, chain in list(self._kept.items()):
            keep = shared_length(chain, wanted)
            if not world.trusted:
                self._kept.pop(world)
            elif keep < len(chain):
                self._tear_down(world, chain, keep)

    def _tear_down(self, world: PooledWorld, chain: list[Any], keep: int) -> None:
        world.lend()
        try:
            outcome = world.execute(f"{IN_RANK}:tear_down", (keep,), lasting=None, timeout=self._seconds_to_end())
        except HarnessError as error:
            self._problems.append(str(error))
            world.distrust()
        else:
            self._problems.extend(_problems(outcome))
            left = [(r.rank, (*r.dirt, *r.value.dirt)) for r in outcome.ranks if isinstance(r.value, RankResult)]
            if any(dirt for _, dirt in left):
                world.distrust()
            self._left.extend(left_behind(left))
            self.note(world, chain, outcome)
        finally:
            world.release()

    def take_problems(self) -> list[str]:
        """Return the errors since the last call in fixtures or sessions that ended in ranks."""
        taken, self._problems = self._problems, []
        return taken

    def take_left(self) -> list[str]:
        """Return the leaks since the last call of fixtures that ended in ranks."""
        taken, self._left = self._left, []
        return taken

    def give_back(self, world: PooledWorld) -> None:
        """Give a world back after a job, and forget it if that was its last."""
        world.release()
        if not world.trusted or not world.reusable:
            self._forget(world)

    def _forget(self, world: PooledWorld) -> None:
        self._informed.pop(world, None)
        self._kept.pop(world, None)

    def _end_session(self, world: PooledWorld) -> None:
        # A world that is not lent again may still be intact (its test failed on every rank): its fixtures end too.
        # A world that lost a rank has ended and was reported, so errors here are new.
        try:
            outcome = world.execute(f"{IN_RANK}:finish", lasting=None, timeout=self._seconds_to_end())
        except HarnessError as error:
            # Only the test that ran then reports that a host vanished.
            self._problems.extend([] if self._pool is None or self._pool.given_up else [str(error)])
        else:
            said = [
                f"rank {rank.rank}: {rank.value}"
                for rank in outcome.ranks
                if isinstance(rank.value, str) and rank.value
            ]
            self._problems.extend(said or ([] if outcome.ok else [outcome.describe()]))
        self._forget(world)

    def _seconds_to_end(self) -> float | None:
        """The deadline of fixtures that end after their last test."""
        seconds = defaults_of(self._config).timeout
        return None if seconds is None else max(seconds, _END_SECONDS)

    def close(self) -> None:
        """End every rank; coverage of ranks is on disk afterwards."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _problems(outcome: WorldOutcome) -> list[str]:
    if not outcome.ok and any(not isinstance(value, RankResult) for value in outcome.values):
        return [outcome.describe()]
    found = [f"rank {rank.rank}: {rank.value.problem}" for rank in outcome.ranks if rank.value.problem]
    # Ranks that all returned may still disagree: one issued a collective that the others did not.
    return found if found or outcome.ok else [outcome.describe()]


def coverage_settings() -> dict[str, Any] | None:
    """How ranks measure coverage: like this process, when it is measured."""
    import sys

    if "coverage" not in sys.modules:
        return None
    from coverage import Coverage

    running = Coverage.current()
    if running is None:
        return None
    data_file = running.get_option("run:data_file") or ".coverage"
    return {
        "config_file": running.config.config_file or False,
        "data_file": str(Path(str(data_file)).absolute()),
        "branch": running.get_option("run:branch"),
        "source": running.get_option("run:source"),
        "include": running.get_option("run:include"),
        "omit": running.get_option("run:omit"),
    }
