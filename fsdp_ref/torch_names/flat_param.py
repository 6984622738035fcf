"""A flat parameter by itself, under torch's names: for metadata and life-cycle tests without a wrapper.

``FlatParamHandle`` takes the arguments of torch's class and answers its questions in its own tuples; everything is
delegated to :class:`fsdp_ref.handle.flat_handle.FlatHandle`. Source: ``torch.distributed.fsdp._flat_param``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref.comm.groups import DataParallelGroups
from fsdp_ref.comm.tensor_parallel import is_dtensor
from fsdp_ref.config import CPUOffload, MixedPrecision, UnitConfig, coerce_sharding_strategy
from fsdp_ref.config import ShardingStrategy as _Strategy
from fsdp_ref.env import full_precision_in_eval
from fsdp_ref.errors import FlattenError, listing
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.flatten import check_params, flatten
from fsdp_ref.handle.marked_parameter import FlatParameter
from fsdp_ref.naming import join_fqn
from fsdp_ref.storage.views import ManagedParam, ParamSite
from fsdp_ref.torch_names.inclusive_view import (
    FlatParamShardMetadata,
    ShardParamInfo,
    shard_metadata,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "ShardParamInfo",
]


class FlatParamHandle:
    """One flat parameter over a process group, sharded from the start.

    Args:
        params: parameters to flatten.
        fully_sharded_module: the module that has them, anywhere below it.
        device: where they compute.
        sharding_strategy: ours or torch's.
        offload_params: keep the shard on the CPU.
        mp_param_dtype: dtype of computation.
        mp_reduce_dtype: dtype of reduction.
        keep_low_precision_grads: leave gradients in the reduction dtype.
        process_group: the shard group.
        use_orig_params: keep the users' parameter objects.

    Raises:
        FlattenError: an empty list, parameters that are not below the module, or that cannot be flattened together.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        fully_sharded_module: nn.Module,
        device: torch.device,
        sharding_strategy: object,
        offload_params: bool,
        mp_param_dtype: torch.dtype | None,
        mp_reduce_dtype: torch.dtype | None,
        keep_low_precision_grads: bool,
        process_group: dist.ProcessGroup,
        use_orig_params: bool,
    ) -> None:
        params = list(params)
        check_params(params, [f"number {index}" for index in range(len(params))], use_orig_params=use_orig_params)
        spread = [f"number {index}" for index, param in enumerate(params) if is_dtensor(param)]
        if spread:
            raise FlattenError(
                f"FlatParamHandle: expected plain parameters, got DTensors: {listing(spread)}. Use fully_shard."
            )
        managed = sites_below(fully_sharded_module, params)
        found = {id(each.param) for each in managed}
        missing = [f"number {index}" for index, param in enumerate(params) if id(param) not in found]
        if missing:
            raise FlattenError(
                f"FlatParamHandle: `params` were not found below {type(fully_sharded_module).__name__}: expected "
                f"parameters of the module, got {listing(missing)}. Pass the module that has them."
            )
        precision = MixedPrecision(mp_param_dtype, mp_reduce_dtype, keep_low_precision_grads=keep_low_precision_grads)
        config = UnitConfig(
            coerce_sharding_strategy(sharding_strategy) or _Strategy.FULL_SHARD,
            torch.device(device),
            DataParallelGroups(process_group),
            precision,
            CPUOffload(offload_params),
            use_orig_params=use_orig_params,
            full_precision_in_eval=full_precision_in_eval(),
        )
        self.handle = FlatHandle(managed, fully_sharded_module, config)

    @property
    def flat_param(self) -> nn.Parameter:
        """The flat parameter; its data is this rank's shard."""
        return self.handle.flat_param

    @property
    def uses_sharded_strategy(self) -> bool:
        """Whether ranks have different pieces."""
        return self.handle.config.strategy is not _Strategy.NO_SHARD

    def is_sharded(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` has the size of this rank's shard; never with NO_SHARD."""
        return self.uses_sharded_strategy and tensor.numel() == self.handle.shard_map.shard_numel

    def needs_unshard(self) -> bool:
        """Return whether the full parameter must be gathered before it can be read."""
        return self.uses_sharded_strategy and not self.handle.unsharded

    def unshard(self) -> None:
        """Gather the full parameter. Collectives: one all-gather over the group; all ranks must call."""
        self.handle.start_unshard()
        self.handle.finish_unshard()

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Free the full parameter, or leave it there."""
        if free_unsharded_flat_param:
            self.handle.reshard()

    def shard_metadata(self) -> FlatParamShardMetadata:
        """Describe the parameters of which this rank has a piece."""
        return shard_metadata(self.handle.shard_map, self.handle.shard_rank)

    def param_module_names(self) -> list[tuple[str, str]]:
        """Return (parameter name, module name) of each parameter."""
        sites = [managed.sites[0] for managed in self.handle.originals.managed]
        return [(site.name, site.fqn.rpartition(".")[0]) for site in sites]

    def flatten_tensors(self, tensors: Sequence[Tensor]) -> Tensor:
        """Flatten other tensors of the same shapes, with the padding of the flat parameter."""
        return flatten(tensors, self.handle.layout, self.handle.config.device)

    def __repr__(self) -> str:
        return f"FlatParamHandle(flat_fqns={self.handle.fqns})"


def sites_below(module: nn.Module, params: Iterable[nn.Parameter]) -> list[ManagedParam]:
    """Find every place of ``params`` (compared by identity) below ``module``.

    Returns:
        One entry per parameter places, in the order of ``named_modules`` with duplicates, then of registration. A place that
        has several names is one place.
    """
    wanted = set(params)
    places: dict[nn.Parameter, tuple[dict[tuple[nn.Module, str], ParamSite], list[str]]] = {}
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        for name, param in submodule.named_parameters(recurse=False, remove_duplicate=False):
            if param in wanted:
                sites, names = places.setdefault(param, ({}, []))
                names.append(join_fqn(prefix, name))
                sites.setdefault((submodule, name), ParamSite(submodule, name, names[-1]))
    return [ManagedParam(param, tuple(sites.values()), tuple(names[1:])) for param, (sites, names) in places.items()]
