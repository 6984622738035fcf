"""Collectives that compiled code issues: they are recorded, and the compiler traces nothing of the recorder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_testing.ranks.ledger import interception


@pytest.mark.world(2)
def test_a_compiled_function_issues_collectives_and_the_recorder_is_not_traced(world):
    files: set[str] = set()

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            files.update(re.findall(r'File "([^"]+)"', node.stack_trace or ""))
        return graph.forward

    @torch.compile(backend=backend)
    def gathered(mine: torch.Tensor) -> torch.Tensor:
        out = torch.empty(4)
        work = dist.all_gather_into_tensor(out, mine * 2, async_op=True)
        work.wait()
        return out + 1

    torch.compiler.reset()
    calls = []
    with interception.listen(lambda _group, call, _site: calls.append(call.what[0])):
        assert gathered(torch.full((2,), float(world.rank))).tolist() == [1.0, 1.0, 3.0, 3.0]
    assert len(calls) == 1 and calls[0].startswith("all_gather"), calls
    of_recorder = str(Path(interception.__file__).parent)
    assert files and not [name for name in files if name.startswith(of_recorder)], files
