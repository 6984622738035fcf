"""`--dist-pool` is refused where processes are there already, whichever launcher started them."""

from __future__ import annotations

import pytest

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.plugin import dist_pool

MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    "variables", [{"RANK": "0", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}]
)
def test_a_launchers_processes_are_not_started_again(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    dist_pool.check()
    for name, value in (MEETING | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match="got those of a launcher"):
        dist_pool.check()
