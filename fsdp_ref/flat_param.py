"""Torch's names for a flat parameter by itself; see ``fsdp_ref.torch_names.flat_param``."""

from fsdp_ref.torch_names.flat_param import FlatParameter, FlatParamHandle, FlatParamShardMetadata, ShardParamInfo

__all__ = ["FlatParamHandle", "FlatParamShardMetadata", "FlatParameter", "ShardParamInfo"]
