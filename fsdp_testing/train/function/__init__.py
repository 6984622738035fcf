"""Does a team's own training loop give the same result on every world size, and if not, why?

- `check`: runs the loop on worlds of several sizes and compares what it returns.
- `comparison`: where two runs differ first, and what of them is undecided. Pure.
- `disturbance`: how far roundings alone may move what a loop returns.
- `observation`: what a rank holds and computes at each optimizer step; `batches` what forwards were given.
- `reading`, `held`: what a rank holds of a model, and whose are the tensors that an optimizer steps.
- `deepspeed_engine`: the same of DeepSpeed, through its accessors.
- `evidence`: what a rank saw of the loop while it ran: backward passes, reductions, seeds, random numbers, gradients.
- `causes`: which of the usual mistakes the evidence shows. Pure.
"""

from fsdp_testing.train.function.check import (
    TrainingDiffers,
    TrainingPartlyUndecided,
    TrainingUndecided,
    check_training,
)

__all__ = ["TrainingDiffers", "TrainingPartlyUndecided", "TrainingUndecided", "check_training"]
