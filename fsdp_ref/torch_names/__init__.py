"""Names that exist only for compatibility with torch: tools and older programs read them. No core module needs them."""

from fsdp_ref.handle.marked_parameter import DESCRIBERS
from fsdp_ref.torch_names.inclusive_view import describe

DESCRIBERS[:] = [describe]
