"""Does a training script that nobody changed give on N ranks what one process gives?

- `check`: runs the script on worlds of several sizes and compares each with one process.
- `running`, `launched`: how a world, and a rank in it, runs the script, as torchrun would.
- `surroundings`: what it may touch beside them, files and other machines.
- `loaders`, `feeding`, `rows`: what data the ranks took, how they share it, and how one process is given the same.
- `parts`: which parts of one process's parameters each rank has, where ranks share the work on the same rows. Pure.
- `conventions`: by which conventions N ranks are not one process, and how one process follows them too.
- `numbers`, `copies`: what the script logs, and which copies of its weights it keeps.
- `whole`: what a world computed, put together from its ranks. Pure.
- `deciding`, `readings`: whether both are the same; in which way losses and logged numbers are.
- `resuming`: whether it goes on from its own checkpoint as if it had not been stopped.
- `causes`: which of the usual mistakes is seen. Pure.
- `report`: how the verdict reads. Pure.
"""

from fsdp_testing.train.script.check import ScriptDiffers, ScriptUndecided, check_script, examine
from fsdp_testing.train.script.feeding import batch

__all__ = ["ScriptDiffers", "ScriptUndecided", "batch", "check_script", "examine"]
