"""Training on CUDA devices: the numbers of one process, memory that is freed, streams of its own.

Run by `tox -e gpu`, and by `tox -e sim` on simulated devices. Over nccl each rank has a device; over gloo-cuda ranks
share what there is, so that one device shows collectives between several ranks.
"""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_ref import BackwardPrefetch, CPUOffload, MixedPrecision
from fsdp_ref.comm_hooks import LowPrecisionState, bf16_compress_hook
from fsdp_ref.states import UnitState

pytestmark = pytest.mark.gpu


class OnDevices:
    """What must hold on CUDA devices, however ranks communicate."""

    def test_training_is_that_of_one_process(self, pair, api, strategy) -> None:
        pair(api, strategy).train()

    @pytest.mark.parametrize("limit", [True, False])
    @pytest.mark.parametrize("ahead", [BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None])
    def test_nobody_reads_before_it_is_written(self, pair, strategy, ahead, limit) -> None:
        # A device that is busy for milliseconds in each block lets every copy, gather and reduction that does not wait
        # for it run first.
        slow = functools.partial(pair("orig", strategy).Net, slow=True)
        options = {"limit_all_gathers": limit, "backward_prefetch": ahead, "forward_prefetch": True}
        pair("orig", strategy, slow, **options).train(steps=2)

    def test_offloaded_parameters_live_on_the_host(self, pair, api, strategy) -> None:
        case = pair(api, strategy, functools.partial(pair().Net, slow=True), cpu_offload=CPUOffload(True))
        for seed in range(3):
            case.backward(seed)
            params = list(case.model.parameters())
            assert {param.device.type for param in params} == {"cpu"}
            assert all(param.grad is None or param.grad.device.type == "cpu" for param in params)
            assert any(param.grad is not None for param in params)
            case.step()
            case.compare()

    def test_offloaded_gradients_accumulate_in_and_out_of_no_sync(self, pair, api) -> None:
        case = pair(api, cpu_offload=CPUOffload(True))
        with case.no_sync():
            case.backward(0)
        case.backward(1)
        case.backward(2)
        case.step()
        case.compare()

    def test_no_sync_accumulates(self, pair, api, strategy) -> None:
        case = pair(api, strategy, functools.partial(pair().Net, slow=True))
        with case.no_sync():
            case.backward(0)
            case.backward(1)
        case.backward(2)
        case.step()
        case.compare()

    def test_computation_in_bfloat16(self, pair, api, strategy) -> None:
        # Small whole numbers: every product and sum is exact in bfloat16, and so is the sum over ranks.
        dtypes = set()

        def small() -> nn.Module:
            net = pair().Net(6, 2)
            with torch.no_grad():
                for place, param in enumerate(net.parameters()):
                    param.copy_(((torch.arange(param.numel()) + place) % 3 == 0).view_as(param))
            for block in net.blocks:
                block.register_forward_pre_hook(lambda module, args: dtypes.add(args[0].dtype))
            net.blocks[0].up.weight.data.zero_()  # keeps sums below 256
            return net

        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        case = pair(api, strategy, small, mixed_precision=precision)
        xs = torch.tensor([[float(rank % 2), 1.0, 0.0, 1.0, 0.0, 1.0] for rank in range(case.world.size)]).double()
        xs = xs.to(case.device).unsqueeze(1)
        (sum(case.plain(x).sum() for x in xs) / case.world.size).backward()
        dtypes.clear()
        case.model(xs[case.world.rank]).sum().backward()
        assert dtypes == {torch.bfloat16}
        for optimizer in (torch.optim.SGD(case.plain.parameters(), 1.0), torch.optim.SGD(case.model.parameters(), 1.0)):
            optimizer.step()
        # The mean over three ranks is divided twice, in float32.
        case.compare(rtol=4 * 2.0**-24, atol=0.0)

    def test_summoned_edits_are_kept(self, pair, api, strategy) -> None:
        case = pair(api, strategy)
        case.train(1)
        with case.full():
            for param in case.model.parameters():
                assert param.device == case.device
                param.data = param.data * 2
        for param in case.plain.parameters():
            param.data.mul_(2)
        case.compare()
        case.train(2)

    def test_parameters_summoned_to_the_host(self, pair) -> None:
        case = pair("orig")
        case.train(1)
        with case.full(rank0_only=True, offload_to_cpu=case.units()[0].handle.sharded):
            if case.world.rank == 0:
                for param in case.model.parameters():
                    param.data.add_(1.0)
        for param in case.plain.parameters():
            param.data.add_(1.0)
        case.compare()

    @pytest.mark.covers("B148")
    @pytest.mark.parametrize("offload", [False, True])
    def test_clipping(self, pair, api, strategy, offload) -> None:
        case = pair(api, strategy, cpu_offload=CPUOffload(offload))
        case.backward(0)
        want = torch.nn.utils.clip_grad_norm_(case.plain.parameters(), 0.01)
        norm = case.clip(0.01)
        assert norm.device.type == ("cpu" if offload else case.device.type)
        torch.testing.assert_close(norm.cpu(), want.cpu(), **case.CLOSE)
        case.step()
        case.compare()

    def test_parameters_built_on_the_host_are_moved(self, pair, api) -> None:
        case = pair(api, build_on_cpu=True, device_id=pair().device, sync_module_states=True)
        assert {param.device for param in case.model.parameters()} == {case.device}
        case.train()

    def test_inputs_on_the_host_are_moved(self, pair, api) -> None:
        case = pair(api)
        x = case.inputs(0)[0]
        torch.testing.assert_close(case.model(x.cpu()), case.plain(x), **case.CLOSE)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_activation_checkpointing(self, pair, api, strategy, reentrant) -> None:
        class Recomputing(pair().Net):
            def forward(self, x):
                x = self.inp(x)
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=reentrant)
                return self.out(x)

        pair(api, strategy, Recomputing).train(2)

    def test_a_compressing_hook(self, pair) -> None:
        case = pair("orig")
        case.model.register_comm_hook(LowPrecisionState(case.world.group, torch.float64), bf16_compress_hook)
        for param in (*case.plain.parameters(), *case.model.parameters()):
            param.data.fill_(0.5)
        x = torch.ones(1, 6, dtype=torch.float64, device=case.device)
        case.plain(x).sum().backward()
        case.model(x).sum().backward()
        # Every rank has the same gradient: bfloat16 keeps 8 bits of it, and the division by ranks rounds twice more.
        with case.full(with_grads=True):
            for have, want in zip(case.model.parameters(), case.plain.parameters(), strict=True):
                torch.testing.assert_close(have.grad, want.grad, rtol=4 * 2.0**-8, atol=0.0)

    def test_training_goes_on_after_a_failed_backward(self, pair, api, strategy) -> None:
        case = pair(api, strategy)
        out = case.model(case.inputs(0)[0])
        out.register_hook(lambda grad: 1 / 0)
        inner = case.units()[2].module.down
        handle = inner.register_full_backward_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            case.model(case.inputs(0)[0]).sum().backward()
        handle.remove()
        case.optimizer.zero_grad()
        case.train(2)

    def test_evaluation_frees_full_parameters(self, pair, api, full_bytes) -> None:
        case = pair(api, "FULL_SHARD", lambda: Wide(pair().Block))
        x = torch.ones(1, Wide.WIDTH, dtype=torch.float64, device=case.device)
        sharded = case.units()[0].handle.sharded
        with torch.no_grad():
            case.model(x)  # warms up streams and workspaces
            gc.collect()  # models of earlier tests
            case.device_module.synchronize()
            case.device_module.reset_peak_memory_stats()
            before = case.device_module.memory_allocated()
            case.model(x)
            case.device_module.synchronize()
        assert case.device_module.memory_allocated() - before == 0
        assert full_bytes(case.model) == 0
        block_bytes = sum(param.nbytes for param in case.plain.blocks[0].parameters())
        if sharded:
            grown = case.device_module.max_memory_allocated() - before
            assert block_bytes <= grown <= 4 * block_bytes  # two blocks, what ranks exchange, and room for rounding
            assert {unit.handle.state for unit in case.units() if unit.handle} == {UnitState.SHARDED}

    def test_steps_leave_no_memory_behind(self, pair, api, strategy) -> None:
        case = pair(api, strategy)

        def held() -> int:
            gc.collect()
            case.device_module.synchronize()
            return case.device_module.memory_allocated()

        sizes = []
        for seed in range(12):
            case.backward(seed)
            case.step()
            sizes.append(held())
        assert sizes[-1] == sizes[3]

    def test_communication_has_streams_of_its_own(self, pair, api, watch_collectives) -> None:
        case = pair(api)
        case.train(1)
        with watch_collectives() as seen:
            case.backward(1)
        default = case.device_module.current_stream().stream_id
        gathers = {call.stream for call in seen if call.op == "all_gather"}
        # Not of fingerprints, which are whole numbers: they are made and compared on the default stream.
        reductions = {call.stream for call in seen if call.op != "all_gather" and call.tensor.is_floating_point()}
        assert len(reductions) == 1
        assert default not in reductions
        if case.units()[0].handle.sharded:
            assert len(gathers) == 1
            assert default not in gathers
            assert gathers != reductions

    def test_state_dict_round_trip(self, pair, api, strategy) -> None:
        case = pair(api, strategy)
        case.train(1)
        state = case.model.state_dict()
        case.same(state, case.plain.state_dict().items())
        case.backward(1)
        case.step()
        case.model.load_state_dict(state)
        have = case.params()
        case.same(have, state.items())


class Wide(nn.Module):
    """Blocks of 16 MiB, large beside whatever libraries keep."""

    WIDTH = 724

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(self.WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.world([1, 2], backend="nccl")
class TestOverNccl(OnDevices):
    """Each rank on a device of its own."""


@pytest.mark.world([2, 3], backend="gloo-cuda")
class TestOnSharedDevices(OnDevices):
    """Ranks that share devices."""


@pytest.mark.world([1, 2], backend="nccl")
def test_evaluation_does_not_wait_for_the_device(pair, api) -> None:
    case = pair(api)
    x = case.inputs(0)[0]
    with torch.no_grad():
        case.model(x)
        case.device_module.set_sync_debug_mode("error")
        try:
            case.model(x)
        finally:
            case.device_module.set_sync_debug_mode("default")


@pytest.mark.world([1, 2], backend="nccl")
def test_a_step_does_not_stop_the_host(pair, api, strategy) -> None:
    """Torch raises wherever the host would wait for the device: forward, backward, clipping and the step enqueue alone."""
    case = pair(api, strategy)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    inputs = [case.inputs(seed)[case.world.rank] for seed in range(3)]
    for x in inputs[:2]:  # what is made once: streams, marks, communicators
        case.model(x).square().mean().backward()
        case.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
    case.device_module.synchronize()
    case.device_module.set_sync_debug_mode("error")
    try:
        case.model(inputs[2]).square().mean().backward()
        case.clip(1.0)
        optimizer.step()
    finally:
        case.device_module.set_sync_debug_mode("default")
