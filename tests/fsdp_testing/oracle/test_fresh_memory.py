"""Memory that nobody wrote to holds garbage while a case runs, and only then.

In a process of its own, as a rank is: what other tests have freed lies about in this one, and small pieces of it are
handed out as they are.
"""

from __future__ import annotations

import subprocess
import sys

FROM_THE_SYSTEM = 4_300_000
"""So many elements of eight bytes come from the system as zeros."""
BEGIN = "import torch\nfrom fsdp_testing.oracle.execute import filled_with_garbage\n"


def run(source: str) -> None:
    ended = subprocess.run([sys.executable, "-c", BEGIN + source], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_new_memory_holds_no_number_that_passes_for_right():
    run(
        "for dtype in (torch.float64, torch.float32, torch.bfloat16):\n"
        f"    for numel in (300, {FROM_THE_SYSTEM}):\n"
        "        with filled_with_garbage():\n"
        "            fresh = torch.empty(numel, dtype=dtype)\n"
        "        assert (fresh.double().abs() > 1e38).all(), (dtype, numel, fresh)\n"
    )


def test_of_small_pieces_only_those_that_fit_exactly_are_left_as_they_were():
    run(
        "with filled_with_garbage():\n"
        "    pieces = [torch.empty(3, dtype=torch.bfloat16) for _ in range(200)]\n"
        "filled = sum(bool((piece.double().abs() > 1e38).all()) for piece in pieces)\n"
        "assert filled >= 180, filled\n"
    )


def test_zeroed_memory_and_results_are_as_ever_and_it_ends_with_the_context():
    run(
        "with filled_with_garbage():\n"
        "    assert torch.zeros(300).abs().max() == 0\n"
        "    assert torch.ones(300).double().sum() == 300\n"
        "    assert bytearray(1000) == bytes(1000)\n"
        f"assert torch.empty({FROM_THE_SYSTEM}, dtype=torch.float64).abs().max() == 0\n"
    )
