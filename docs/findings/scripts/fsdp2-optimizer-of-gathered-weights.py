"""FSDP2: an optimizer built after a forward without a backward; saving model and optimizer then kills the ranks.

Run with torch alone: python fsdp2-optimizer-of-gathered-weights.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = fully_shard(nn.Linear(3, 3), mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    earlier = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3))  # the root stays gathered, so that parameters() gives gathered weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = StateDictOptions(full_state_dict=True)
    try:
        get_optimizer_state_dict(model, earlier, options=options)
    except KeyError as error:
        print(f"rank {rank}: the state of an optimizer that was built before cannot be saved: KeyError: {error}")
    else:
        return  # fixed in this torch
    get_model_state_dict(model, options=options)  # frees them
    get_optimizer_state_dict(model, optimizer, options=options)  # steps on them, to make the optimizer's state
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ranks = [mp.get_context("fork").Process(target=main, args=(rank, f"{folder}/store")) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    codes = [process.exitcode for process in ranks]
    print(f"exit codes of the ranks (-11: killed by SIGSEGV): {codes}")
    assert any(code != 0 for code in codes), "fixed in this torch: nothing is killed and nothing raises"
