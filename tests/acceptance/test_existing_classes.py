"""Test classes written for torch's multi-process bases, or in DeepSpeed's style, on the pool: every one of their ways to end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.plugin import dist_pool
from fsdp_testing.plugin.test_classes.deepspeed_classes import take_over

TORCH_CLASSES = '''
import multiprocessing, os, pathlib, signal, sys, threading, unittest
from datetime import timedelta
import pytest
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest, MultiProcessTestCase, run_subtests, skip_if_lt_x_gpu,
)
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests


def kill_rank_1(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


class Base(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        os.environ["SET_UP_IN"] = str(os.getpid())
        self._spawn_processes()

    def tearDown(self):
        assert self.rank == self.MAIN_PROCESS_RANK
        super().tearDown()
        pathlib.Path(self.file_name).unlink(missing_ok=True)

    def join(self):
        dist.init_process_group("gloo", store=dist.FileStore(self.file_name, 2), rank=self.rank, world_size=2)

    def total(self):
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()


class Cases(Base):
    def test_file_store(self):
        self.join()
        self.assertEqual(self.total(), 2)

    def test_environment(self):
        assert os.environ["SET_UP_IN"] != str(os.getpid())
        assert not multiprocessing.current_process().daemon
        assert not dist.is_initialized()
        assert self.rank == int(os.environ["LOCAL_RANK"])
        dist.init_process_group("gloo")
        assert (dist.get_rank(), dist.get_world_size()) == (self.rank, int(os.environ["WORLD_SIZE"]))
        self.assertEqual(self.total(), 2)

    @parametrize("n", [1, 2])
    def test_parametrized(self, n):
        self.join()

        def check(m):
            self.assertEqual(self.total() * n * m, 2 * n * m)

        run_subtests(self, {"m": [1, 3]}, check)

    def test_a_rank_may_lag_behind_another_that_expects_it(self):
        self.join()
        dist.barrier()  # a rank that ended now would close connections that the other one is still making
        if self.rank == 0:
            with self.assertRaises(RuntimeError):
                dist.monitored_barrier(timeout=timedelta(milliseconds=700))

    def test_special_exit(self):
        if self.rank == 0:
            os.abort()

    def test_leak(self):
        threading.Thread(target=threading.Event().wait, daemon=True, name="left").start()

    @skip_if_lt_x_gpu(2)
    def test_skip_by_exit_code(self):
        raise AssertionError

    def test_skip_by_exception(self):
        raise unittest.SkipTest("no such thing")

    @unittest.expectedFailure
    def test_expected_failure(self):
        raise ValueError

    def test_fails_kill(self):
        kill_rank_1(self.rank)

    @unittest.expectedFailure
    def test_fails_kill_although_expected(self):
        kill_rank_1(self.rank)

    @pytest.mark.xfail
    def test_fails_kill_although_xfail(self):
        kill_rank_1(self.rank)

    def test_fails_raise(self):
        self.join()
        if self.rank == 1:
            raise ValueError("this is why")
        dist.barrier()

    def test_fails_uneven_skip(self):
        if self.rank == 1:
            sys.exit(74)

    def test_fails_exit_code(self):
        sys.exit(3)

    def test_fails_exit_of_one(self):
        if self.rank:
            sys.exit(0)

    def test_fails_other_sums(self):
        self.join()
        try:
            dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX if self.rank else dist.ReduceOp.SUM)
        except RuntimeError:
            pass


class CasesOfExits(Base):
    def setUp(self):
        super().setUp()
        aborts = self.test_aborts, self.test_fails_exit_of_a_process
        self.special_return_code_checks = {getattr(test, "__wrapped__", test): -signal.SIGABRT for test in aborts}

    def test_aborts(self):
        os.abort()

    def test_fails_exit_of_a_process(self):
        if self.rank:
            os._exit(0)
        os.abort()


instantiate_parametrized_tests(Cases)


class Forgetful(MultiProcessTestCase):
    """Its setUp starts nothing: upstream this passes."""

    def test_fails_without_processes(self):
        raise AssertionError


class Overriding(Base):
    def _join_processes(self, fn):
        pass

    def test_fails_as_nobody_joins(self):
        raise AssertionError


class Continuous(MultiProcContinuousTest):
    world_size = 2
    pids = []

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def note(self):
        value = torch.ones(1)
        dist.all_reduce(value)
        type(self).pids.append(os.getpid())
        return value.item(), type(self).pids

    def test_a(self):
        assert self.note()[0] == 2

    def test_b_same_processes(self):
        total, pids = self.note()
        assert total == 2 and len(set(pids)) == 1 and len(pids) == 2
        assert os.environ["RANK"] == str(self.rank)

    def test_c_fails(self):
        assert self.rank == 0

    def test_c_fails_exit(self):
        sys.exit(0)

    def test_d_goes_on_in_new_ones(self):
        total, pids = self.note()
        assert total == 2 and len(pids) == 1

    @skip_if_lt_x_gpu(2)
    def test_e_skips(self):
        raise AssertionError

    @unittest.expectedFailure
    def test_f_fails_kill_although_expected(self):
        kill_rank_1(self.rank)
'''

OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) \S+?::(\w+)::(\w+)|^(SKIPPED) \[(\d+)\]", re.M)


def outcomes(text: str) -> dict[str, str]:
    return {name: word for word, _, name, _, _ in OUTCOME.findall(text) if name}


def test_torchs_classes_end_as_their_processes_did(run_folder, tmp_path: Path) -> None:
    (tmp_path / "test_classes.py").write_text(TORCH_CLASSES)
    verdict = run_folder(tmp_path, "--dist-pool", "--rank-timeout", "60", "-rA", "-W", "default")
    found = outcomes(verdict.text)
    failed = {name for name, word in found.items() if word == "FAILED"}
    meant = {"test_c_fails"} | {name for name in found if "_fails_" in name}
    # os.abort of rank 0 where nothing was announced is a death like any other.
    assert failed == meant | {"test_special_exit"}, verdict.text
    assert len(meant) == 14
    assert found.pop("test_expected_failure") == "XFAIL"
    assert verdict.skipped == 3
    # Torch 2.15 says "accelerator" where earlier releases say "CUDA".
    for reason in ("no such thing", "Need at least 2 (CUDA|accelerator) devices"):
        assert re.search(reason, verdict.text)
    assert {word for name, word in found.items() if name not in failed} == {"PASSED"}
    assert "rank 1 raised ValueError: this is why" in verdict.text
    assert "test_classes/torch_classes.py:" not in verdict.text, "what the ranks raised comes first, not our frames"
    assert "rank 1 died by SIGKILL" in verdict.text
    assert "rank 0 ended with exit code 0; rank 1 ended with exit code 74" in verdict.text
    assert "rank 1 raised SystemExit: 0" in verdict.text
    assert "rank 1 died with exit code 0" in verdict.text
    assert "ranks disagree: collective #1 of the default group differs: rank 0 issued all_reduce(sum)" in verdict.text
    assert "got no process" in verdict.text
    assert "got a class that overrides _join_processes" in verdict.text
    assert re.search(r"test_leak: ranks 0, 1 left thread: thread 'left' \(daemon\)", verdict.text)


DEEPSPEED_STYLE = '''
"""A base class with the launchers of DeepSpeed's, each of which says so if it is called after all."""
import os
from abc import ABC
import pytest
import torch, torch.distributed as dist


class DistributedExec(ABC):
    world_size = 2
    is_dist_test = True
    reuse_dist_env = False
    non_daemonic_procs = False

    def __call__(self, request):
        self._current_test = getattr(self, request.function.__name__)
        names = [n for n in request.function.__code__.co_varnames[: request.function.__code__.co_argcount] if n != "self"]
        self._fixture_kwargs = {name: request.getfixturevalue(name) for name in names}
        file = request.getfixturevalue("tmp_path") / "store"
        for size in [self.world_size] if isinstance(self.world_size, int) else self.world_size:
            self._launch_daemonic_procs(size, f"file://{file}{size}")

    def _launch_daemonic_procs(self, num_procs, init_method):
        raise AssertionError("started processes of its own")

    _launch_non_daemonic_procs = _launch_daemonic_procs

    def _dist_run(self, local_rank, num_procs, master_port, init_method, skip_msg=""):
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(local_rank)
        os.environ["MASTER_PORT"] = str(master_port)
        dist.init_process_group("gloo", init_method=init_method, rank=local_rank, world_size=num_procs)
        try:
            self._current_test(**self._fixture_kwargs)
        except pytest.skip.Exception as skip:
            return skip.msg
        return skip_msg

    def _dist_destroy(self):
        dist.destroy_process_group()
'''
DEEPSPEED_TESTS = """
import os, signal
import pytest, torch, torch.distributed as dist
from base import DistributedExec


class TestSizes(DistributedExec):
    world_size = [1, 3]

    @pytest.mark.parametrize("n", [5])
    def test_sum(self, n):
        value = torch.full((1,), float(n))
        dist.all_reduce(value)
        assert value.item() == n * dist.get_world_size()
        assert int(os.environ["WORLD_SIZE"]) == dist.get_world_size() in (1, 3)

    def test_skip(self):
        pytest.skip("not here")

    def test_fails_kill(self):
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""
DEEPSPEED_CONFTEST = """
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if getattr(item.cls, "is_dist_test", False):
        item.cls()(item._request)
        item.runtest = lambda: True
"""


def test_deepspeeds_style(run_folder, tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(DEEPSPEED_STYLE)
    (tmp_path / "conftest.py").write_text(DEEPSPEED_CONFTEST)
    (tmp_path / "test_styled.py").write_text(DEEPSPEED_TESTS)
    verdict = run_folder(tmp_path, "--dist-pool", "-rA")
    assert (verdict.passed, verdict.skipped, verdict.failed) == (1, 1, 1), verdict.text
    assert outcomes(verdict.text)["test_fails_kill"] == "FAILED"
    assert "rank 0 died by SIGKILL" in verdict.text


def test_what_cannot_be_taken_over_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match=r"got one without _launch_daemonic_procs, .*, _dist_run, _dist_destroy"):
        take_over(type("TestOther", (), {"is_dist_test": True}))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        InvalidArgument, match="expected to start processes, got those of a launcher, which are the ranks"
    ):
        dist_pool.check()


OWN_GROUP = """
@pytest.mark.world(2, backend="bare")
@pytest.mark.parametrize("again", [1, 2])
def test_group_of_its_own(world, again):
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world.size == int(os.environ["WORLD_SIZE"])
    assert dist.get_rank() == world.rank == int(os.environ["LOCAL_RANK"])
    dist.destroy_process_group()
"""


def test_a_marked_test_makes_its_own_group(run) -> None:
    verdict = run(OWN_GROUP, "--strict-hygiene")
    assert verdict.counts() == (2, 0, 0), verdict.text
