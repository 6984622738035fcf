"""Asserts what the simulated device promises; a program of its own, since a process has one PrivateUse1 device."""

import simdevice
import torch

simdevice.register()
sim = torch.sim
main, side = sim.current_stream(), sim.Stream()


def fresh(value: float = 1.0) -> torch.Tensor:
    tensor = torch.full((4,), value, device="sim")
    sim.synchronize()
    return tensor


def refused(call, *words):
    try:
        call()
    except RuntimeError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"expected a refusal that says {words}")


# What another stream writes is there after a wait for it, and not before.
value = fresh()
with sim.stream(side):
    value.mul_(3)
assert (value + 0).tolist() == [1.0] * 4
main.wait_stream(side)
assert (value + 0).tolist() == [3.0] * 4

# An event stands for what came before it was recorded.
value, event = fresh(), sim.Event()
with sim.stream(side):
    event.record()
    value.mul_(3)
main.wait_event(event)
assert (value + 0).tolist() == [1.0] * 4
side.synchronize()
assert (value + 0).tolist() == [3.0] * 4

# Events tell virtual time: an operator takes 1 ms, streams overlap, and a wait begins with the end of what it waits for.
for waits, took in ((False, 3.0), (True, 5.0)):
    value, begin, end = fresh(), sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    with sim.stream(side):  # the host waits for more than the default stream was given
        for _ in range(4):
            value.mul_(1)
    sim.synchronize()
    begin.record()
    with sim.stream(side):
        for _ in range(2):
            value.mul_(1)
    if waits:
        main.wait_stream(side)
    for _ in range(3):
        value = value + 0
    end.record()
    assert begin.elapsed_time(end) == took, begin.elapsed_time(end)

# New memory is not written; memory that another stream still reads is given out again, unless it is recorded.
assert torch.empty(100_000, device="sim").isnan().all()
for recorded in (False, True):
    source = fresh(5.0)
    with sim.stream(side):
        read = source * 1
    if recorded:
        source.record_stream(side)
    place = source.data_ptr()
    del source
    reused = torch.full((4,), 7.0, device="sim")
    assert (reused.data_ptr() == place) is not recorded
    sim.current_stream().synchronize()
    main.wait_stream(side)
    assert (read + 0).tolist() == [5.0 if recorded else 7.0] * 4

# Copies that do not block: the host reads, and overwrites, too early.
pinned = torch.empty(4, pin_memory=True)
assert pinned.is_pinned()
assert not torch.empty(4).is_pinned()
pinned.copy_(fresh(2.0), non_blocking=True)
assert pinned.isnan().all()
sim.synchronize()
assert pinned.tolist() == [2.0] * 4
moved = pinned.to("sim", non_blocking=True)
pinned.fill_(9.0)
assert moved.tolist() == [9.0] * 4
copied = fresh(2.0).to("cpu", non_blocking=True)  # into pinned memory, as torch does it on CUDA
assert copied.isnan().all()
sim.synchronize()
assert copied.tolist() == [2.0] * 4
assert fresh(2.0).cpu().tolist() == [2.0] * 4

# Devices that are mixed up, and memory that is gone.
refused(lambda: fresh() + torch.ones(4), "same device")
refused(lambda: fresh() + torch.ones(4, device="sim:1"), "same device")
freed = fresh()
freed.untyped_storage().resize_(0)
refused(lambda: freed + 1, "memory was freed")
refused(lambda: torch.ones(1, device="sim:8"), "there are 8 devices")

# A host that is to run ahead is told where it waits.
value = fresh()
sim.set_sync_debug_mode("error")
(value + 1).mul_(2)
refused(value.sum().item, "the host waits for the device")
refused(value.nonzero, "the host waits for the device")
sim.set_sync_debug_mode("default")

# Sizes, and errors about them, are known at once; so are random numbers, which are the host's.
refused(lambda: fresh() + torch.ones(3, device="sim"), "must match")
torch.manual_seed(3)
drawn = torch.rand(5, device="sim")
torch.manual_seed(3)
assert torch.equal(drawn.cpu(), torch.rand(5))
assert fresh().nonzero().tolist() == [[0], [1], [2], [3]]

# Memory is counted.
before = sim.memory_allocated()
large = torch.zeros(1000, device="sim")
assert sim.memory_allocated() - before == 4096
del large
assert sim.memory_allocated() == before
assert sim.max_memory_allocated() >= before + 4096

# Autocast casts as on the CPU where both lists have the operator, and to float32 what is on the accelerators' list.
layer, rows = torch.nn.Linear(4, 3), torch.randn(5, 4)
with torch.autocast("cpu", dtype=torch.bfloat16):
    there = layer(rows)
layer.to("sim")
with torch.autocast("sim", dtype=torch.bfloat16):
    here = layer(rows.to("sim"))
    assert here.dtype == torch.bfloat16
    assert torch.equal(here.cpu(), there)
    assert here.exp().dtype == here.softmax(-1).dtype == here.sum().dtype == here.norm().dtype == torch.float32
    assert torch.addcmul(here, here, rows.new_ones(5, 3).to("sim")).dtype == torch.float32
    assert (here + here).dtype == torch.bfloat16
    share = here.sigmoid()
    refused(lambda: torch.nn.functional.binary_cross_entropy(share, share), "binary_cross_entropy_with_logits")
    here.sum().backward()
assert layer.weight.grad.dtype == torch.float32
with torch.autocast("sim"):
    assert layer(rows.to("sim")).dtype == torch.float16
    with torch.autocast("sim", enabled=False):
        assert layer(rows.to("sim")).dtype == torch.float32

# Nothing is late for whoever asks for that, as under CUDA_LAUNCH_BLOCKING: a wait that is left out does not show.
sim.set_late("none")
value = torch.ones(4, device="sim")
with sim.stream(side):
    value.mul_(3)
assert (value + 0).tolist() == [3.0] * 4

# The threads of backward end with the process's own code: one that outlives the interpreter may abort the process.
fresh().requires_grad_().sum().backward()
assert simdevice._backward_threads() > 0
simdevice._end_backward_threads()
assert simdevice._backward_threads() == 0
simdevice._end_backward_threads()  # as at exit, once more
