"""get_optimizer_state_dict of an optimizer that never stepped counts one step, or has nothing where gradients exist.

The next real step is another one; a directory that was saved beside gradients is refused by who loads without them.

Run with torch alone: python dsd-optimizer-never-stepped.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def steps_and_weight(wrap, *, save: bool) -> tuple[list[float], float]:
    """Step counters right before the first step, and the sum of the weights right after it."""
    torch.manual_seed(0)
    model = wrap(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    if save:
        get_optimizer_state_dict(model, optimizer)
    counted = [float(state["step"]) for state in optimizer.state.values()]
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    total = torch.stack([getattr(p, "to_local", lambda p=p: p)().detach().sum() for p in model.parameters()]).sum()
    dist.all_reduce(total)
    return counted, total.item()


def refusal(wrap, path: str) -> str:
    """What loading says of a directory that was saved between the first backward and the first step."""
    model, fresh = wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    saved, room = (get_optimizer_state_dict(m, torch.optim.AdamW(m.parameters())) for m in (model, fresh))
    assert not saved["state"], "fixed in this torch: the state is made beside gradients"
    dcp.save({"optimizer": saved}, checkpoint_id=path)
    try:
        dcp.load({"optimizer": room}, checkpoint_id=path)
    except dcp.api.CheckpointException as error:
        return str(next(iter(error.failures.values()))[0])
    return ""


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for wrap in (fsdp1, fully_shard):
        (none, plain), (counted, saved) = (steps_and_weight(wrap, save=save) for save in (False, True))
        if rank == 0:
            print(
                f"{wrap.__name__}: saved before the first step, counters {counted}; weights {plain:.6f} -> {saved:.6f}"
            )
        assert not none
        assert 1.0 in counted, "fixed in this torch: nothing is counted"
        assert abs(plain - saved) > 1e-3, "fixed in this torch: the first step is the same"
        said = refusal(wrap, f"{path}-{wrap.__name__}")
        if rank == 0:
            print(f"{wrap.__name__}: saved beside gradients; loading says {said!r}")
        assert "Missing key in checkpoint state_dict" in said, "fixed in this torch: the directory loads"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
