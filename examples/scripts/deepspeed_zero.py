"""DeepSpeed's ZeRO on CPUs, stage 0 to 3 by --stage, in bfloat16 by --bf16; the engine owns backward and step."""

import argparse
import logging
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
# Without its extension for shared memory, which it compiles for minutes, DeepSpeed uses gloo.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": args.bf16},
    }
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, _, loader, _ = deepspeed.initialize(model=model, optimizer=optimizer, training_data=data, config=config)
    for _ in range(2):
        for inputs, targets in loader:
            if args.bf16:
                inputs = inputs.bfloat16()
            loss = F.mse_loss(engine(inputs).float(), targets)
            engine.backward(loss)
            engine.step()


if __name__ == "__main__":
    main()
