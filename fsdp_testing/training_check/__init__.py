"""Does a team's own training loop give the same result on every world size, and if not, why?

- `check`: runs the loop on worlds of several sizes and compares what it returns.
- `evidence`: what a rank saw of the loop while it ran: backward passes, reductions, seeds, random numbers, gradients.
- `causes`: which of the usual mistakes the evidence shows. Pure.
"""

from fsdp_testing.training_check.check import TrainingDiffers, check_training

__all__ = ["TrainingDiffers", "check_training"]
