"""A project that knows nothing of this one but its name draws random cases and judges its own implementation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ADAPTERS = """
from torch.nn.parallel import DistributedDataParallel


class Adapter:
    capabilities = frozenset({"no_shard", "nested_wrapping", "uneven_parameters", "accumulate_without_no_sync", "no_sync"})

    def __init__(self, name, factor):
        self.name, self.factor = name, factor

    def wrap(self, module, setup):
        model = DistributedDataParallel(module, process_group=setup.group)
        if self.factor != 1.0:
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(self.factor))
        return model

    def no_sync(self, model):
        return model.no_sync()


SOUND = Adapter("sound", 1.0)
BROKEN = Adapter("broken", 1.001)
"""

TESTS = """
import pytest
from hypothesis import Phase, given, settings

from fsdp_testing.cases import drawing as strategies
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.cases.records import Verdict

import our_sharding

CASES = strategies.cases(capabilities=our_sharding.SOUND.capabilities, world_sizes=(2,), max_operations=6)
PLAIN = settings(max_examples=6, deadline=None, derandomize=True, database=None, phases=(Phase.generate,))


def judge(name, case):
    judgement = CaseRunner().judge(f"our_sharding:{name}", case)
    assert judgement.outcome.verdict is Verdict.PASS, judgement.finding and judgement.finding.explanation
    return judgement.outcome.comparisons


@PLAIN
@given(case=CASES)
def test_sound(case):
    assert judge("SOUND", case) > 0


@PLAIN
@given(case=CASES)
def test_broken(case):
    judge("BROKEN", case)


def test_a_feature_can_be_left_out():
    with pytest.raises(ValueError, match="tree.what"):
        strategies.cases(excluded={"tree.what"})
"""


def test_a_project_outside_finds_its_own_bug_with_our_strategies(tmp_path: Path) -> None:
    (tmp_path / "our_sharding.py").write_text(ADAPTERS)
    (tmp_path / "test_our_sharding.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "."]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert "1 failed, 2 passed" in ended.stdout, ended.stdout + ended.stderr
    failed = ended.stdout[ended.stdout.index("FAILURES") :]
    assert "test_broken" in failed
    assert "Case(" in failed, failed
    assert "in operation" in failed
