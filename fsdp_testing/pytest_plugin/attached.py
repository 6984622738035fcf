"""How does a marked test run under torchrun? In torchrun's own processes, which are the world, on one host or many.

Nothing is started here: every process runs the test as pytest always does, and its `world` fixture is the group of all of
them. What the pool does for its ranks from outside is done from inside as far as that goes:

- processes that collected other tests, or none, end with a message before the first collective (through torchrun's store);
- generators are seeded before each test, the marker's deadline ends the process with the stacks of its threads;
- a test that ends differently on two ranks (one skips, one passes) fails on all of them;
- the first failure on a rank ends that process's session: its peers may wait in a collective for ever, and torchrun's
  agent ends them when it has gone.

Isolation, hygiene and the comparison of collectives are the pool's and do not apply.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
from collections.abc import Generator
from datetime import timedelta
from typing import Any

import pytest

from fsdp_testing.env import Launch
from fsdp_testing.errors import HarnessError
from fsdp_testing.pool import attachment
from fsdp_testing.pool.world import current_world
from fsdp_testing.pytest_plugin.hygiene_report import report_teardown_failure
from fsdp_testing.pytest_plugin.marker import WorldRequest

NAME = "fsdp_testing.attached"
_REQUEST = pytest.StashKey[WorldRequest]()
_MEET_SECONDS = 60.0


class Attached:
    """Runs marked items in this process, as one rank of torchrun's world."""

    def __init__(self, config: pytest.Config, launch: Launch) -> None:
        self.config = config
        self.launch = launch
        self._items: list[pytest.Item] = []
        self._ended: dict[str, str] = {}
        # Made while pytest does not capture: what ends a process is to be seen.
        self._stderr = os.dup(2)

    def take(self, item: pytest.Item, request: WorldRequest) -> None:
        item.stash[_REQUEST] = request
        self._items.append(item)

    def world_of(self, item: pytest.Item) -> Any:
        """Return this process's view of torchrun's world; None for a test without the marker."""
        request = item.stash.get(_REQUEST, None)
        return None if request is None else attachment.join(self.launch, request.backend)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """Make sure that every process is about to run the same tests."""
        if not self._items or self.config.option.collectonly:
            return
        digest = hashlib.blake2b("\n".join(item.nodeid for item in self._items).encode(), digest_size=16).hexdigest()
        try:
            digests = attachment.compare_plans(self.launch, [digest], timedelta(seconds=_MEET_SECONDS))
        except HarnessError as error:
            raise pytest.UsageError(str(error)) from None
        mine = digests[self.launch.rank]
        others = [rank for rank, theirs in enumerate(digests) if theirs != mine]
        if others:
            raise pytest.UsageError(
                f"torchrun: expected every process to collect the same {len(self._items)} tests marked `world` in the same "
                f"order, got other ones on rank(s) {', '.join(map(str, others))} than on rank {self.launch.rank}. "
                "Give all processes the same arguments, and no plugin that shuffles."
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Refuse worlds that these processes are not; begin the others alike."""
        request = item.stash.get(_REQUEST, None)
        if request is None:
            return
        if request.size != self.launch.world_size:
            text = f"torchrun made {self.launch.world_size} processes, the test asks for a world of {request.size}"
            if self.config.option.require_backend:
                pytest.fail(f"{text} (--require-backend)", pytrace=False)
            pytest.skip(text)
        from fsdp_testing.pool.hygiene import seed_generators

        attachment.join(self.launch, request.backend)
        seed_generators(0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Run within the deadline, then agree with the peers about how the test ended."""
        request = item.stash.get(_REQUEST, None)
        if request is None:
            return (yield)
        self._ended.clear()
        if request.timeout is not None:
            faulthandler.dump_traceback_later(request.timeout, exit=True, file=self._stderr)
        try:
            result = yield
            if request.size == self.launch.world_size:
                self._agree(item)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how each phase ended here."""
        how = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
        if self._ended.get("test") != "failed" and (report.when == "call" or how != "passed"):
            self._ended["test"] = how

    def _agree(self, item: pytest.Item) -> None:
        mine = self._ended.get("test", "passed")
        if mine == "failed":
            item.session.shouldfail = (
                f"{item.nodeid} failed on rank {self.launch.rank}, and peers may wait for it in a collective: under "
                "torchrun the first failure ends the run"
            )
            return
        endings = current_world().all_gather_object(mine)
        if len(set(endings)) > 1:
            how = ", ".join(f"rank {rank} {outcome}" for rank, outcome in enumerate(endings))
            item.session.shouldfail = f"ranks disagree about {item.nodeid}: {how}"
            report_teardown_failure(item, f"ranks disagree: {how}")
