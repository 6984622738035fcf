"""Pure arithmetic of flat buffers: where parameters lie, which rank has what.

Standard library only. No tensor, no process group, no device: every statement here is property-tested without ranks.
"""

from fsdp_ref.layout.flat_layout import FlatLayout, padding_to
from fsdp_ref.layout.param_spec import ParamSpec, is_dense, is_row_major, row_major_stride
from fsdp_ref.layout.shard_map import ParamSpan, ShardMap
from fsdp_ref.layout.span import Span

__all__ = [
    "FlatLayout",
    "ParamSpan",
    "ParamSpec",
    "ShardMap",
    "Span",
    "is_dense",
    "is_row_major",
    "padding_to",
    "row_major_stride",
]
