"""Does a model train under an implementation on N ranks as it does in one process?

- `configurations`: the tiny configuration of a causal language model of Transformers; models of functions.
- `training`: the few steps that a rank trains, and what is seen of them.
- `check`: runs them on one process and on N ranks, and compares.
- `with_accelerate`: Accelerate as an implementation.
"""

from fsdp_testing.train.model.check import ModelDiffers, ModelReport, ModelUndecided, check_model
from fsdp_testing.train.model.configurations import MODELS

__all__ = ["MODELS", "ModelDiffers", "ModelReport", "ModelUndecided", "check_model"]
