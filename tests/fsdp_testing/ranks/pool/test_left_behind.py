"""Whatever a call leaves changed is named, and the next call of the pool finds everything as it was."""

from __future__ import annotations

import atexit
import decimal
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_programs  # type: ignore[import-not-found]  # beside this file
import torch
import torch.distributed as dist

from fsdp_testing.ranks.pool import Pool, hygiene

HELD: list[Any] = []


def other(*_: Any, **__: Any) -> str:
    return "another function"


class Model:
    def forward(self) -> str:
        return "its own"


def helper() -> str:
    return "its own"


def _decimal() -> None:
    decimal.getcontext().prec = 3
    decimal.getcontext().traps[decimal.Inexact] = True


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _hard_limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (10_000, 10_000))


def _no_descriptor_allowed() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _removed() -> None:
    del sys.modules["json.decoder"]


def _replaced() -> None:
    sys.modules["json"] = type(sys)("json")


def _imported_again() -> None:
    del sys.modules["small_programs"]
    import small_programs  # noqa: F401 - another module object


def _sleep() -> None:
    time.sleep = other  # type: ignore[assignment]  # the dirt under test


def _relu() -> None:
    torch.Tensor.relu = other  # type: ignore[assignment,method-assign]  # a method that it inherits


def _checkpoint() -> None:
    import torch.utils.checkpoint

    torch.utils.checkpoint.checkpoint = other  # type: ignore[assignment]  # the dirt under test


def _run() -> None:
    subprocess.run = other  # type: ignore[assignment]  # the dirt under test


def _users_function() -> None:
    sys.modules[__name__].helper = other  # type: ignore[attr-defined]  # code under test


def _users_class() -> None:
    Model.forward = other  # type: ignore[assignment,method-assign]  # code under test


def _start_method() -> None:
    multiprocessing.set_start_method("spawn", force=True)


def _descriptors() -> None:
    HELD.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(200))


def _files() -> None:
    HELD.extend(Path(__file__).open() for _ in range(30))  # noqa: SIM115 - the dirt under test


def _to_the_last_descriptor() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
    try:
        while True:
            HELD.append(os.open(__file__, os.O_RDONLY))
    except OSError:
        pass


def _receive() -> None:
    HELD.append(dist.irecv(torch.zeros(2), 1 - dist.get_rank()))


def _receive_dropped() -> None:
    dist.irecv(torch.zeros(2), 1 - dist.get_rank())


def _send() -> None:
    dist.isend(torch.full((2,), -1.0), 1 - dist.get_rank())


def _exchange() -> list[float]:
    """What the next test would do with messages of its own."""
    mine, got = torch.full((2,), 7.0), torch.zeros(2)
    sent = dist.isend(mine, 1 - dist.get_rank())
    dist.recv(got, 1 - dist.get_rank())
    sent.wait()
    return [float(number) for number in got]


def _look_at_decimal() -> tuple[Any, ...]:
    context = decimal.getcontext()
    return context.prec, context.traps[decimal.Inexact]


def _look_at_users_code() -> list[str]:
    return [helper(), Model().forward()]


# name: (what is left, kind, part of the text, what the next call looks at)
LEFT: dict[str, tuple[Callable[[], Any], str, str, Callable[[], Any]]] = {
    "numpy errors": (lambda: np.seterr(all="raise"), "library default", "numpy.seterr", np.geterr),
    "decimal context": (_decimal, "library default", "decimal context", _look_at_decimal),
    "socket timeout": (
        lambda: socket.setdefaulttimeout(0.1),
        "library default",
        "socket default timeout",
        socket.getdefaulttimeout,
    ),
    "start method": (_start_method, "library default", "start method", multiprocessing.get_start_method),
    "niceness": (lambda: os.nice(1), "process limits", "niceness", lambda: os.nice(0)),
    "limit": (_limit, "process limits", "RLIMIT_NOFILE", lambda: resource.getrlimit(resource.RLIMIT_NOFILE)),
    "hard limit": (_hard_limit, "process limits", "RLIMIT_CPU", lambda: resource.getrlimit(resource.RLIMIT_CPU)),
    "no descriptor allowed": (
        _no_descriptor_allowed,
        "process limits",
        "RLIMIT_NOFILE",
        lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
    ),
    "removed module": (_removed, "imported module", "json.decoder was removed", lambda: "json.decoder" in sys.modules),
    "replaced module": (_replaced, "imported module", "module json was replaced", lambda: sys.modules["json"] is json),
    "module imported again": (
        _imported_again,
        "imported module",
        "small_programs was replaced",
        lambda: sys.modules["small_programs"] is small_programs,
    ),
    "time.sleep": (_sleep, "patched function", "time.sleep", lambda: time.sleep.__name__),
    "Tensor.relu": (_relu, "patched function", "Tensor.relu: was inherited", lambda: torch.ones(1).relu().tolist()),
    "checkpoint": (
        _checkpoint,
        "patched function",
        "torch.utils.checkpoint.checkpoint",
        lambda: torch.utils.checkpoint.checkpoint.__name__,
    ),
    "subprocess.run": (_run, "patched function", "subprocess.run", lambda: subprocess.run.__name__),
    "user's function": (_users_function, "patched function", "test_left_behind.helper", _look_at_users_code),
    "user's class": (_users_class, "patched function", "Model.forward", _look_at_users_code),
    "atexit handler": (lambda: atexit.register(helper), "atexit handler", "test_left_behind.helper", lambda: None),
    "descriptors of a device": (_descriptors, "open file", "200 descriptors of devices", lambda: len(HELD)),
    "many files": (_files, "open file", "20 more descriptors are open", lambda: len(HELD)),
    "the last descriptor": (_to_the_last_descriptor, "open file", "more descriptors are open", lambda: len(HELD)),
    "receive": (_receive, "message", "of its group was never waited for", _exchange),
    "receive that was dropped": (_receive_dropped, "message", "of its group was never waited for", _exchange),
    "send": (_send, "message", "of its group was never waited for", _exchange),
}


def leave(name: str) -> None:
    LEFT[name][0]()


def look(name: str) -> Any:
    return LEFT[name][3]()


@pytest.mark.parametrize("name", LEFT)
def test_what_a_call_leaves_is_named_and_the_next_one_finds_all_as_it_was(name: str, pool: Pool) -> None:
    _, kind, text, _ = LEFT[name]
    before = called(pool, look, name)
    assert before.ok, before.describe()
    assert not any(rank.dirt for rank in before.ranks), before.ranks[0].dirt
    left = called(pool, leave, name)
    assert left.ok, left.describe()
    for rank in left.ranks:
        dirt = [entry for entry in rank.dirt if entry.kind == kind]
        assert any(text in entry.what for entry in dirt), rank.dirt
        assert len(rank.dirt) < 20, "it is told in short"
    after = called(pool, look, name)
    assert after.ok, after.describe()
    assert after.values == before.values


def called(pool: Pool, function: Callable[..., Any], *args: Any) -> Any:
    world = pool.world(2)
    try:
        return world.execute(function, args, timeout=20.0)
    finally:
        world.release()


def collective_nobody_waits_for() -> None:
    dist.all_reduce(torch.ones(100_000), async_op=True)


def sums() -> float:
    total = torch.ones(2)
    dist.all_reduce(total)
    return float(total.sum())


def test_a_collective_that_all_issue_and_nobody_waits_for_ends_by_itself(pool: Pool) -> None:
    """It cannot reach the next call: all have issued it, so it completes, and the next one has a number of its own."""
    for _ in range(20):
        assert called(pool, collective_nobody_waits_for).ok
        assert called(pool, sums).values == [4.0, 4.0]


def collective_of_one() -> None:
    if dist.get_rank() == 0:
        HELD.append(dist.all_reduce(torch.ones(2), async_op=True))


def test_a_collective_that_one_issues_and_nobody_waits_for_fails_the_call(pool: Pool) -> None:
    outcome = called(pool, collective_of_one)
    assert not outcome.ok
    assert "different numbers of collectives" in outcome.cause
    assert called(pool, sums).values == [4.0, 4.0]


def waits_for_its_messages() -> list[float]:
    got = _exchange()
    sent = torch.full((2,), 3.0)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, 1 - dist.get_rank()), dist.P2POp(dist.irecv, torch.zeros(2), 1 - dist.get_rank())]
    )
    for work in works:
        work.wait()
    return got


def wraps_for_good() -> None:
    """What torch itself does to a user's optimizer on first use is nobody's dirt."""
    optimizer = small_programs_optimizer()
    optimizer.zero_grad()
    optimizer.step()


class Plain(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:
        del closure


def small_programs_optimizer() -> Any:
    return Plain([torch.nn.Parameter(torch.ones(1))], {})


def imports_more() -> None:
    import colorsys
    import wave

    HELD.extend((colorsys, wave))


def finds_a_package_of_several_again() -> None:
    """As setuptools does with `backports`: parts of several distributions, and no code of its own."""
    package = type(sys)("parts_of_several")
    package.__path__ = []
    package.part = type(sys)("parts_of_several.part")  # type: ignore[attr-defined]
    sys.modules["parts_of_several"] = package


@pytest.mark.parametrize(
    "function", [waits_for_its_messages, wraps_for_good, imports_more, finds_a_package_of_several_again, sums]
)
def test_what_is_no_dirt_is_not_named(function: Callable[[], Any], pool: Pool) -> None:
    world = pool.world(2)
    for _ in range(2):
        outcome = world.execute(function, timeout=20.0)
        assert outcome.ok, outcome.describe()
        assert [rank.dirt for rank in outcome.ranks] == [(), ()]
    assert world.trusted
    world.release()


@pytest.mark.parametrize(
    ("name", "value", "alone"), [("part", sys, True), ("__getattr__", look, False), ("size", 3, False)]
)
def test_a_package_that_holds_more_than_modules_may_not_be_replaced(name: str, value: Any, alone: bool) -> None:
    package = type(sys)("parts_of_several")
    package.__path__ = []
    setattr(package, name, value)
    assert hygiene._holds_modules_alone(package) is alone
