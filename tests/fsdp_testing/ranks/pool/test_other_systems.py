"""Where ranks cannot be made (Windows, macOS): one sentence when they are asked for, and everything else works.

That pytest works is tested in tests/acceptance/test_light_entry.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# What Windows lacks, and what macOS lacks.
SYSTEMS = {
    "windows": "import os, select\ndel os.fork, os.register_at_fork, os.memfd_create, select.poll\n",
    "macos": "import os\ndel os.memfd_create\n",
}


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_ranks_are_refused_in_one_sentence(system: str, tmp_path: Path) -> None:
    code = SYSTEMS[system] + "import fsdp_testing\nprint('imported')\nfsdp_testing.run_ranks('math:sqrt', 4.0)\n"
    ended = run(code, tmp_path)
    assert ended.stdout == "imported\n", ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("fsdp_testing.errors.PoolBroken: pool.world: expected Linux, where ranks are forked")
    assert "os.memfd_create" in last
    assert "Run tests on ranks on Linux" in last


@pytest.mark.parametrize("system", SYSTEMS)
def test_commands_without_ranks_work(system: str, tmp_path: Path) -> None:
    ended = run(SYSTEMS[system] + "from fsdp_testing.cli.main import main\nmain(['list', 'capabilities'])\n", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "unit_trace" in ended.stdout
