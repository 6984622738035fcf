"""Fixtures of all tests: pytest in a subprocess, with this project's plugin; Pythons forked from one that has imported torch.

Where GitHub runs them, the slowest tests are written into the summary of the job.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.ranks.pool.world import inside_rank

sys.path.append(str(Path(__file__).parent / "sessions"))
pytest_plugins = ["pytester"]
# No test fails because the machine is busy.
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

VENDOR = Path(__file__).parents[1] / "examples" / "vendor"
_BACKENDS = {"cuda": "nccl"}
_OF_MOST_RANKS = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint")
"""What nearly every rank of these tests needs: imported once for all workers of pytest-xdist, not in the first ranks of each."""
_ENTRY_POINTS = "[fsdp_testing.backends]\nsim = simdevice.testing:SIM\n"


@pytest.fixture(scope="session")
def zygote() -> Any:
    """The `Zygote` of tests/sessions/forked.py, one for all tests of this process."""
    import forked

    return forked.shared()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cuda",
        metavar="NAME",
        help="what tests marked gpu run on: cuda (over nccl and gloo-cuda), sim (simulated, examples/vendor), or another "
        "registered backend with a device of its own (default: cuda)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the simulated device known where it is not installed, and say at once why no test could run on a device."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background job ignores Ctrl-C, and so would every process that a test interrupts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not inside_rank():
        default_pool().add_preload(*_OF_MOST_RANKS)
    if config.option.device == "sim":
        make_simulated_device_known()
    if config.option.markexpr.strip() == "gpu" and config.option.require_backend:
        from fsdp_testing.base.backends import backend_named

        device = config.option.device
        reason = backend_named(_BACKENDS.get(device, device)).unavailable(1)
        if reason is not None:
            advice = "" if device == "sim" else " Without a GPU, `--device sim` runs these tests."
            raise pytest.UsageError(f"--device {device}: {reason}.{advice}")


def make_simulated_device_known() -> str:
    """Stand in for `pip install examples/vendor`, for this process and those that it starts; return the new PYTHONPATH."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if str(VENDOR) not in folders:
        site = Path(tempfile.mkdtemp(prefix="fsdp-testing-sim-"))
        atexit.register(shutil.rmtree, site, ignore_errors=True)
        (site / "simdevice-0.dist-info").mkdir()
        (site / "simdevice-0.dist-info" / "entry_points.txt").write_text(_ENTRY_POINTS)
        (site / "simdevice-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: simdevice\nVersion: 0\n")
        folders = [str(site), str(VENDOR), *folders]
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    # A worker of pytest-xdist has this PYTHONPATH, and the sys.path that its controller began with.
    sys.path[:0] = [folder for folder in folders[: folders.index(str(VENDOR)) + 1] if folder not in sys.path]
    return os.environ["PYTHONPATH"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """A worker more than there are processors: many tests wait, for a process to start or for the deadline of a hang."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of devices name CUDA's backends; another device has one."""
    device = item.config.option.device
    mark = item.get_closest_marker("world")
    if device not in _BACKENDS and mark is not None and item.get_closest_marker("gpu") is not None:
        item.add_marker(pytest.mark.world(*mark.args, **{**mark.kwargs, "backend": device}), append=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        reports = [report for found in terminalreporter.stats.values() for report in found]
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(slowest([report for report in reports if isinstance(report, pytest.TestReport)]))


def slowest(reports: list[pytest.TestReport]) -> str:
    """A table of the slowest tests, setup and teardown included."""
    from slowest import table

    seconds: Counter[str] = Counter()
    for report in reports:
        seconds[report.nodeid] += report.duration  # type: ignore[assignment]  # a Counter of seconds
    return "\n".join([*table(seconds), ""])
