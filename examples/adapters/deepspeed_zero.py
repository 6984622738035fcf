"""DeepSpeed's ZeRO, stages 1 to 3, on the CPU, with deepspeed 0.19. Run in the folder of this file:

    DS_ACCELERATOR=cpu fsdp-verify run deepspeed_zero:ZERO_1 deepspeed_zero:ZERO_2 deepspeed_zero:ZERO_3

DeepSpeed's engine is made with the optimizer and owns backward and step: `wrap` returns a shell, `build_optimizer`
makes the engine in it. The engine's step clears gradients, and the engine trains in float32, whatever the model's
dtype.
Accumulation is the caller's (`managed_gradient_accumulation: false`): each `step()` is a boundary.

Stages 1 and 2 show no gradient before the step, and stage 3 shows complete ones through collectives. So gradients
are judged by the weights after the step, and the adapter only has `full_parameters`.
"""

import logging
import os
from contextlib import contextmanager, nullcontext

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.utils import safe_set_full_fp32_param
from torch import nn

from fsdp_testing.adapters.adapter import TorchStyle

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
# Without its extension for shared memory, which it compiles for minutes and loads for seconds, DeepSpeed uses gloo.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

CLAIMED = frozenset(
    {
        "accumulate_without_no_sync",
        "forward_only",
        "shared_parameters",
        "reused_modules",
        "frozen_parameters",
        "uneven_parameters",
        "buffers",
        "container_outputs",
        "uneven_batches",
        "unused_parameters",
        "summon_writeback",
    }
)


class Shell(nn.Module):
    """The model; calls go through the engine once there is one."""

    def __init__(self, module):
        super().__init__()
        self.inner = module
        self.engine = None

    def forward(self, *args, **kwargs):
        called = self.inner if self.engine is None else self.engine
        return called(*args, **kwargs)

    def train(self, mode=True):
        super().train(mode)
        if self.engine is not None:
            self.engine.train(mode)
        return self


def wrap(module, setup):
    rank, size = str(setup.rank), str(setup.world_size)
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_SIZE=size)
    return Shell(module)


def builder(stage):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,  # absent, every step clips to a norm of 1
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }

    def build_optimizer(model, make):
        trained = make([parameter for parameter in model.inner.parameters() if parameter.requires_grad])
        engine, optimizer, *_ = deepspeed.initialize(
            model=model.inner, optimizer=trained, config=config, dist_init_required=False
        )
        object.__setattr__(model, "engine", engine)  # not as a submodule: it holds the same modules under other names
        return optimizer

    return build_optimizer


@contextmanager
def full_parameters(model, *, writeback):
    parameters = dict(model.inner.named_parameters())
    partitioned = [parameter for parameter in parameters.values() if hasattr(parameter, "ds_id")]
    gathered = deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0 if writeback else None)
    with gathered if partitioned else nullcontext():
        # Stages 1 and 2 hold whole parameters all the time: what is only looked at is a copy of them.
        whole = parameters if partitioned or writeback else {n: p.detach().clone() for n, p in parameters.items()}
        yield {name: parameter.data for name, parameter in whole.items()}
        edited = {n: p.data.clone() for n, p in whole.items()} if writeback else {}
    if writeback and model.engine is not None and not partitioned:
        model.engine.optimizer.refresh_fp32_params()
    for name, value in edited.items() if partitioned and model.engine is not None else ():
        # Stage 3 steps from copies of its own, which GatheredParameters does not reach.
        if parameters[name].requires_grad:
            safe_set_full_fp32_param(parameters[name], value)


def zero_grad(model, optimizer, set_to_none):
    if model.engine is None:
        model.inner.zero_grad(set_to_none)
    else:
        optimizer.zero_grad(set_to_none)


def finish(model):
    if model.engine is not None:
        model.engine.destroy()


def adapter(stage, strategy, *more):
    return TorchStyle(
        name=f"deepspeed-zero{stage}",
        wrap=wrap,
        capabilities=CLAIMED | {strategy, *more},
        build_optimizer=builder(stage),
        backward=lambda model, loss: model.engine.backward(loss),
        step=lambda model, optimizer: model.engine.step(),
        zero_grad=zero_grad,
        no_sync=lambda model: nullcontext() if model.engine is None else model.engine.no_sync(),
        full_parameters=full_parameters,
        named_parameters=lambda model: model.inner.named_parameters(),
        named_buffers=lambda model: model.inner.named_buffers(),
        step_clears_gradients=True,
        widest_dtype="float32",
        finish=finish,
    )


ZERO_1 = adapter(1, "shard_grad_op", "no_sync")
ZERO_2 = adapter(2, "shard_grad_op")
ZERO_3 = adapter(3, "full_shard")
