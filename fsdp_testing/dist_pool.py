"""Import this module to run torch's multi-process test classes on the pool, under any test runner.

`import fsdp_testing.dist_pool` in a test file or a conftest does what `pytest --dist-pool` does.
`fsdp_testing.plugin.test_classes` says what is replaced.
"""

from __future__ import annotations

from fsdp_testing.plugin.test_classes import torch_classes
from fsdp_testing.plugin.test_classes.deepspeed_classes import take_over as take_over_deepspeed
from fsdp_testing.ranks.pool.world import inside_rank

__all__ = ["take_over_deepspeed"]

# A process of a test class imports the test file too, and starts no processes itself.
if not inside_rank():
    torch_classes.take_over()
