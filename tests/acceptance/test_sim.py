"""The simulated device: its work is late, so that a missing wait is a wrong number, and everything else is as on a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
VENDOR = HERE.parents[1] / "examples" / "vendor"


@pytest.fixture(scope="module", autouse=True)
def _needs_a_compiler() -> None:
    """Compiled here, once for each machine, so that no rank's time is spent on it."""
    sys.path.insert(0, str(VENDOR))
    try:
        from simdevice.testing import unavailable

        reason = unavailable(2)
    finally:
        sys.path.remove(str(VENDOR))
    if reason is not None:
        pytest.skip(reason)


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=HERE.parents[1],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_work_is_late_and_waits_order_it() -> None:
    code, said = run(str(HERE / "late_device.py"), PYTHONPATH=str(VENDOR))
    assert code == 0, said


def test_training_is_right_and_a_missing_wait_is_a_wrong_number() -> None:
    code, said = run("-m", "pytest", "-q", "-m", "gpu", "--device", "sim", "-p", "no:cacheprovider",
                     "-n", "1", "tests/acceptance/on_devices.py")  # fmt: skip
    assert code == 0, said


def test_what_cannot_run_is_one_sentence(tmp_path: Path) -> None:
    cache, gpu = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}, ("-m", "pytest", "-m", "gpu", "--require-backend")
    code, said = run(*gpu, "--device", "sim", "tests/acceptance/test_gpu.py", CXX="no-such-compiler", **cache)
    assert code == 4
    assert said.strip().count("\n") == 0
    assert "compiler 'no-such-compiler' does not run" in said
    assert "runs these tests" not in said
    code, said = run(*gpu, "--device", "sim", "tests/acceptance/test_gpu.py", CXX="false", **cache)
    assert code == 4
    assert "compiler 'false' refuses its source" in said


def test_a_torch_without_privateuse1_hooks_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(VENDOR))
    from simdevice.testing import unavailable

    monkeypatch.delattr(torch.utils, "rename_privateuse1_backend")
    expected = (
        f"the simulated device is a PrivateUse1 device with streams, which torch {torch.__version__} does not know"
    )
    assert unavailable(2) == expected


def test_without_a_gpu_the_simulated_device_is_named() -> None:
    code, said = run("-m", "pytest", "-m", "gpu", "--require-backend", CUDA_VISIBLE_DEVICES="")
    assert code == 4
    assert said.strip().count("\n") == 0
    assert "`--device sim` runs these tests" in said
