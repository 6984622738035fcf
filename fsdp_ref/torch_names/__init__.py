"""What exists only because torch has it: names that tools and older programs read. No core module needs any of it."""

from fsdp_ref.handle.marked_parameter import DESCRIBERS
from fsdp_ref.torch_names.inclusive_view import describe

DESCRIBERS[:] = [describe]
