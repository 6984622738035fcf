"""Ranks on demand: a fork server, kept worlds and their replacement, and the account of what every rank did."""

from fsdp_testing.ranks.pool.controller import Pool, default_pool
from fsdp_testing.ranks.pool.jobs import Failed
from fsdp_testing.ranks.pool.outcome import CollectiveRecord, ErrorRecord, Fate, RankOutcome, WorldOutcome
from fsdp_testing.ranks.pool.world_on_loan import PooledWorld

__all__ = [
    "CollectiveRecord",
    "ErrorRecord",
    "Failed",
    "Fate",
    "Pool",
    "PooledWorld",
    "RankOutcome",
    "WorldOutcome",
    "default_pool",
]
