"""Does a training script that nobody changed give on N ranks what one process gives?

- `check`: runs the script on worlds of several sizes and compares each with one process.
- `launched`: how a rank runs the script, as torchrun would.
- `feeding`: what data the ranks took, and how one process is given the same.
- `whole`: what a world computed, put together from its ranks. Pure.
- `causes`: which of the usual mistakes is seen. Pure.
- `report`: how the verdict reads. Pure.
"""

from fsdp_testing.script_check.check import ScriptDiffers, ScriptUndecided, check_script, examine
from fsdp_testing.script_check.feeding import batch

__all__ = ["ScriptDiffers", "ScriptUndecided", "batch", "check_script", "examine"]
