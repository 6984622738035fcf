"""Torch's own test of FSDP against DDP, with our class in the place of torch's.

``torch.testing._internal.common_fsdp`` holds the models and the helper ``_test_fsdp_parity`` that torch's suite for
FSDP1 is built on: train under DDP, train under FSDP, save, zero and load the state after each step, compare losses and
full parameters. The helper finds FSDP and its settings as globals of its module, which are bound to ours here.

Its mixed-precision branch cannot run on a CPU, with any FSDP: it wants DDP's loss under autocast to be in float32, and
autocast gives bfloat16 there.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fsdp_ref
from fsdp_ref import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, wrap
from fsdp_ref.config import NO_RESHARD_AFTER_FORWARD_STRATEGIES
from fsdp_ref.states import TrainingState

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*`NO_SHARD`"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]

SUBSTITUTES = {
    "FSDP": fsdp_ref.FullyShardedDataParallel,
    "TrainingState": TrainingState,
    "ShardingStrategy": ShardingStrategy,
    "BackwardPrefetch": BackwardPrefetch,
    "CPUOffload": CPUOffload,
    "MixedPrecision": MixedPrecision,
    "NO_RESHARD_AFTER_FORWARD_STRATEGIES": NO_RESHARD_AFTER_FORWARD_STRATEGIES,
    "ModuleWrapPolicy": wrap.ModuleWrapPolicy,
    "always_wrap_policy": wrap.always_wrap_policy,
    "wrap": wrap.wrap,
}
MODELS = (
    "NestedWrappedModule",
    "AlwaysWrapNestedWrappedModule",
    "NonUniformReqGradNWM",
    "TransformerWithSharedParams",
    "MixtureOfExperts",
    "NestedWrappedModuleWithDelay",
)
# A flat parameter trains wholly or not at all: the model that freezes single parameters needs the originals.
CASES = [(name, orig) for name in MODELS for orig in (False, True) if orig or name != "NonUniformReqGradNWM"]
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def product_of_cases():
    """Return the whole product; each model in each form with one strategy in turn, the other two nightly."""
    return [
        pytest.param(
            *(model, orig, strategy),
            marks=[] if turn == number % len(STRATEGIES) else [pytest.mark.slow],
            id=f"{model}-{'orig' if orig else 'flat'}-{strategy}",
        )
        for number, (model, orig) in enumerate(CASES)
        for turn, strategy in enumerate(STRATEGIES)
    ]


SCHEDULES = {
    "backward_pre": {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE},
    "backward_post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "no_prefetch": {"backward_prefetch": None},
    "forward": {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE, "forward_prefetch": True},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
}


@contextmanager
def substituted():
    """The helper's module with our names in it; groups that its models make are destroyed."""
    # Importing torch's test equipment warns of this and that, and setuptools puts folders and importers on the path.
    kept = mock.patch.multiple(sys, path=list(sys.path), meta_path=list(sys.meta_path))
    with warnings.catch_warnings(), kept:
        warnings.simplefilter("ignore")
        import torch.testing._internal.common_fsdp as helper
    groups = []
    new_group = dist.new_group

    def noted(*args, **kwargs):
        groups.append(new_group(*args, **kwargs))
        return groups[-1]

    with mock.patch.multiple(helper, **SUBSTITUTES), mock.patch.object(dist, "new_group", noted):
        yield helper
    for group in groups:
        if isinstance(group, dist.ProcessGroup):  # not a marker for "this rank is no member"
            dist.destroy_process_group(group)


@pytest.fixture
def torch_helper():
    with substituted() as helper:
        yield helper


@pytest.fixture
def parity(torch_helper):
    """Run the helper on one model; returns the models that it trained."""
    from torch.testing._internal.common_utils import TestCase

    class Case(torch_helper.FSDPTestMixin, TestCase):
        process_group = property(lambda self: dist.group.WORLD)

        def __init__(self):
            super().__init__()
            self.trained = []

        def runTest(self):
            """unittest wants a method to be named."""

        def _train_for_several_steps(self, model, *args, **kwargs):
            self.trained.append(model)
            return super()._train_for_several_steps(model, *args, **kwargs)

    def run(name, **options):
        case = Case()
        if name == "MixtureOfExperts":  # its experts differ between ranks: DDP would average them
            options.setdefault("ref_init_fn", torch_helper.DummyDDP)
        case._test_fsdp_parity(
            getattr(torch_helper, name),
            torch_helper.FSDPInitMode.RECURSIVE,
            options.pop("device_init_mode", torch_helper.DEVICEInitMode.DEVICE_BEFORE),
            **options,
        )
        return case.trained

    return run


def check_substituted(trained):
    """The reference was trained without FSDP, the other model with ours alone."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Theirs

    plain, sharded = trained
    kinds = [{type(module) for module in model.modules()} for model in (plain, sharded)]
    assert fsdp_ref.FullyShardedDataParallel not in kinds[0]
    assert isinstance(sharded, fsdp_ref.FullyShardedDataParallel)
    assert Theirs not in kinds[0] | kinds[1]
    assert all(torch.isfinite(param).all() for param in plain.parameters())


@pytest.mark.parametrize(("model", "use_orig_params", "strategy"), product_of_cases())
@pytest.mark.world(2)
def test_trains_as_ddp_does_under_every_schedule(parity, model, strategy, use_orig_params):
    for options in SCHEDULES.values():
        trained = parity(
            model, sharding_strategy=ShardingStrategy[strategy], use_orig_params=use_orig_params, **options
        )
        check_substituted(trained)


@pytest.mark.world(2)
def test_the_helper_notices_a_wrong_gradient(parity, monkeypatch):
    """A fault in the reduction is reported: the comparison is not one of a model with itself."""
    from fsdp_ref.comm.division import DivideFactors

    monkeypatch.setattr(DivideFactors, "for_world", lambda size: DivideFactors(1.0, 1.0))
    with pytest.raises(AssertionError):
        parity("NestedWrappedModule", sharding_strategy=ShardingStrategy.FULL_SHARD)


@pytest.mark.world(2)
def test_torch_has_its_own_names_afterwards():
    with substituted() as helper:
        assert {name: getattr(helper, name) for name in SUBSTITUTES} == SUBSTITUTES
    from torch.distributed.fsdp import FullyShardedDataParallel

    assert helper.FSDP is FullyShardedDataParallel
    assert not [name for name, ours in SUBSTITUTES.items() if getattr(helper, name) is ours]
