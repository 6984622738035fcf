"""Each kind of dirt a job can leave is named, put back where that can be done, and a clean job is silent."""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import copyreg
import faulthandler
import gc
import hashlib
import logging
import logging.config
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config  # imported here, as importing it sets a variable and a filter
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from fsdp_testing.base import compat
from fsdp_testing.ranks.pool import hygiene, hygiene_leftovers
from fsdp_testing.ranks.pool.hygiene import PROBES, Snapshot, seed_generators, take_snapshot


@pytest.fixture(autouse=True)
def _private_temporary_directory(tmp_path: Path) -> Iterator[None]:
    before = hygiene_leftovers.TEMPORARY.path, tempfile.tempdir
    (tmp_path / "own").mkdir()
    hygiene_leftovers.TEMPORARY.use(tmp_path / "own")
    yield
    hygiene_leftovers.TEMPORARY.path, tempfile.tempdir = before


LOGGER = logging.getLogger("of.a.user")
REQUEST = contextvars.ContextVar[str]("request")
REQUEST.set("own")


class _Mode(TorchFunctionMode):
    pass


def _other_relu(x: torch.Tensor) -> torch.Tensor:
    return x


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _filter() -> None:
    warnings.simplefilter("ignore", UserWarning)


def _path() -> None:
    sys.path.insert(0, "/nowhere")


def _relu() -> None:
    torch.nn.functional.relu = _other_relu  # type: ignore[assignment]  # the dirt under test


def _linear() -> None:
    torch.nn.Linear.forward = _other_relu  # type: ignore[assignment,method-assign]  # the dirt under test


def _stdout() -> None:
    sys.stdout = sys.stderr


def _printer() -> None:
    builtins.print = lambda *values: None  # type: ignore[assignment]  # the dirt under test


def _configure_logs() -> None:
    logging.config.dictConfig({"version": 1})


def _pickle_lambdas() -> None:
    copyreg.pickle(Fraction, lambda value: (Fraction, (str(value),)))


# name: (job, kind, part of the text); all of these are put back.
RESTORED: dict[str, tuple[Callable[[], object], str, str]] = {
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), "torch default", "default dtype"),
    "default device": (lambda: torch.set_default_device("meta"), "torch default", "default device"),
    "grad mode": (lambda: torch.set_grad_enabled(False), "torch default", "grad mode"),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), "torch default", "autocast of cpu"),
    "autocast dtype": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        "torch default",
        "autocast dtype of cpu",
    ),
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "torch default", "intra-op threads"),
    "determinism": (lambda: torch.use_deterministic_algorithms(True), "torch default", "deterministic algorithms"),
    "matmul precision": (lambda: torch.set_float32_matmul_precision("medium"), "torch default", "matmul precision"),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), "torch default", "anomaly mode"),
    "cudnn": (lambda: setattr(torch.backends.cudnn, "deterministic", True), "torch default", "cudnn.deterministic"),
    "denormals": (lambda: torch.set_flush_denormal(True), "torch default", "flush denormals"),
    "environment added": (lambda: os.environ.update(LEFT="1"), "environment", "LEFT='1'"),
    "environment removed": (lambda: os.environ.pop("HOME"), "environment", "HOME was removed"),
    "directory": (lambda: os.chdir("/"), "interpreter", "working directory"),
    "filters": (_filter, "warnings filters", "UserWarning"),
    "signal": (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), "signal handler", "SIGTERM"),
    "timer": (lambda: signal.setitimer(signal.ITIMER_REAL, 1000), "interpreter", "timer armed"),
    "blocked signal": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]),
        "interpreter",
        "blocked signals",
    ),
    "sys.path": (_path, "import path", "/nowhere"),
    "sys.argv": (lambda: sys.argv.append("--x"), "import path", "--x"),
    "stdout": (_stdout, "interpreter", "sys.stdout"),
    "excepthook": (lambda: setattr(sys, "excepthook", print), "interpreter", "sys.excepthook"),
    "thread excepthook": (
        lambda: setattr(threading, "excepthook", print),
        "interpreter",
        "threading.excepthook",
    ),
    "print": (_printer, "interpreter", "builtins.print"),
    "recursion": (lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 7), "interpreter", "recursion limit"),
    "gc": (gc.disable, "interpreter", "gc enabled"),
    "faulthandler": (
        lambda: faulthandler.disable() if faulthandler.is_enabled() else faulthandler.enable(file=2),
        "interpreter",
        "faulthandler",
    ),
    "umask": (lambda: os.umask(0o037), "interpreter", "umask"),
    "named logger": (lambda: LOGGER.setLevel(5), "logger", f"level: 0 -> 5 of {LOGGER.name}"),
    "disabled loggers": (_configure_logs, "logger", "disabled: False -> True of "),
    "context variable": (lambda: REQUEST.set("left"), "context variable", "request: 'own' -> 'left'"),
    "pickling": (_pickle_lambdas, "pickling", "Fraction is pickled by <function _pickle_lambdas.<locals>.<lambda>"),
    "log level": (lambda: logging.getLogger().setLevel(5), "logging", "level of the root logger"),
    "log handler": (lambda: logging.getLogger().addHandler(logging.NullHandler()), "logging", "handlers"),
    "log disable": (lambda: logging.disable(logging.CRITICAL), "logging", "logging.disable"),
    "function": (_relu, "patched function", "torch.nn.functional.relu"),
    "method": (_linear, "patched function", "Linear.forward"),
    "function of testing": (
        lambda: setattr(torch.testing, "assert_close", _other_relu),
        "patched function",
        "torch.testing.assert_close",
    ),
    "method of an optimizer": (lambda: setattr(torch.optim.SGD, "step", _other_relu), "patched function", "SGD.step"),
    "method of a thread": (
        lambda: setattr(threading.Thread, "is_alive", _other_relu),
        "patched function",
        "threading.Thread.is_alive",
    ),
    "function of paths": (lambda: setattr(os.path, "lexists", _other_relu), "patched function", "posixpath.lexists"),
    "byte order": (
        lambda: torch.serialization.set_default_load_endianness(torch.serialization.LoadEndianness.BIG),
        "torch default",
        "byte order of torch.load",
    ),
    "mkldnn deterministic": (
        lambda: setattr(torch.backends.mkldnn, "deterministic", True),
        "torch default",
        "mkldnn.deterministic",
    ),
    "gc callback": (lambda: gc.callbacks.append(_other_relu), "interpreter", "gc callbacks"),
    "module hook": (
        lambda: torch.nn.modules.module.register_module_forward_hook(lambda *a: None),
        "module hook",
        "on every module was added",
    ),
    "optimizer hook": (
        lambda: register_optimizer_step_post_hook(lambda *a: None),
        "optimizer hook",
        "on every optimizer was added",
    ),
    "saved tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(_other_relu, _other_relu).__enter__(),
        "torch default",
        "saved_tensors_hooks",
    ),
    "forward mode": (torch.autograd.forward_ad.enter_dual_level, "torch default", "forward-mode level"),
    "autograd threads": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        "torch default",
        "multithreading of autograd",
    ),
    "printing": (lambda: torch.set_printoptions(precision=1), "torch default", "print options"),
    "numpy's printing": (
        lambda: np.set_printoptions(precision=1),
        "library default",
        "numpy.set_printoptions",
    ),
    "future": (
        lambda: torch.__future__.set_overwrite_module_params_on_conversion(True),
        "torch default",
        "overwrite_module_params_on_conversion",
    ),
    "attention": (lambda: torch.backends.cuda.enable_math_sdp(False), "torch default", "attention, math"),
    "mkldnn": (lambda: setattr(torch.backends.mkldnn, "enabled", False), "torch default", "mkldnn.enabled"),
    "debug level": (
        lambda: torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL),
        "torch default",
        "TORCH_DISTRIBUTED_DEBUG",
    ),
    "child": (lambda: subprocess.Popen(["sleep", "1000"]), "child process", "sleep 1000"),
    "file": (lambda: Path(tempfile.mkstemp()[1]), "temporary file", "/own/tmp"),
    "folder": (tempfile.mkdtemp, "temporary file", "/own/tmp"),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("name", RESTORED)
def test_what_can_be_put_back_is_named_and_put_back(name: str) -> None:
    job, kind, text = RESTORED[name]
    untouched = Snapshot()
    snapshot = take_snapshot()
    made = job()
    dirt = [entry for entry in snapshot.restore() if entry.kind != "open file"]
    if name == "file":
        _close_all_on("own")
    assert [entry.kind for entry in dirt] == [kind]
    assert text in dirt[0].what
    assert dirt[0].restored
    assert untouched.restore() == ()
    del made


def _close_all_on(part: str) -> None:
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if part in str(Path(f"/proc/self/fd/{entry}").readlink()):
                os.close(int(entry))


def test_a_thread_left_running_is_named_and_not_put_back() -> None:
    snapshot = take_snapshot()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="straggler", daemon=True)
    thread.start()
    (dirt,) = snapshot.restore()
    stop.set()
    thread.join()
    assert (dirt.kind, dirt.restored) == ("thread", False)
    assert "'straggler' (daemon) still runs Event.wait" in dirt.what


class _EndsWhenWaitedFor(threading.Thread):
    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def run(self) -> None:
        self.go.wait()

    def join(self, timeout: float | None = None) -> None:
        self.go.set()
        super().join(None if timeout is None else 60.0)


def test_a_thread_that_ends_when_it_is_waited_for_is_no_leak() -> None:
    snapshot = take_snapshot()
    _EndsWhenWaitedFor().start()
    assert snapshot.restore() == ()


def test_a_thread_that_has_only_to_get_its_turn_is_no_leak() -> None:
    """It computes without Python's lock, as one does that a busy machine gives no turn for longer than the grace."""
    snapshot = take_snapshot()
    threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha512", b"", b"", 800_000)).start()
    assert snapshot.restore() == ()


def test_an_open_file_is_named_and_not_put_back(tmp_path: Path) -> None:
    snapshot = take_snapshot()
    stream = (tmp_path / "log").open("w")
    left, right = socket.socketpair()
    dirt = snapshot.restore()
    for opened in (stream, left, right):
        opened.close()
    assert [(entry.kind, entry.restored) for entry in dirt] == [("open file", False)] * 3
    assert any("/log" in entry.what for entry in dirt)
    assert any("socket:" in entry.what for entry in dirt)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_file_that_only_awaits_collection_is_no_leak(tmp_path: Path) -> None:
    snapshot = take_snapshot()
    cycle: list[object] = [(tmp_path / "log").open("w")]
    cycle.append(cycle)
    del cycle
    assert snapshot.restore() == ()


def test_modes_left_on_the_stack_are_named_and_not_put_back() -> None:
    snapshot = take_snapshot()
    with _Mode():
        dirt = snapshot.restore()
    # This one answers no call at all, so that torch's own getters fail under it: that too is reported, not raised.
    assert [(entry.kind, entry.restored) for entry in dirt] == [("torch default", False), ("torch mode", False)]
    assert "can no longer be read (NotImplementedError)" in dirt[0].what


def test_inference_mode_left_on_is_named_and_not_put_back() -> None:
    snapshot = take_snapshot()
    with torch.inference_mode():
        dirt = snapshot.restore()
    assert [entry for entry in dirt if "inference mode" in entry.what and not entry.restored]


@pytest.fixture
def single_rank_group() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # exported at run time
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("single_rank_group")
def test_a_process_group_left_behind_is_named() -> None:
    snapshot = take_snapshot()
    group = dist.new_group([0], group_desc="mine")
    dirt = snapshot.restore()
    assert [(entry.kind, entry.restored) for entry in dirt] == [("process group", False)]
    assert "'mine' of ranks [0]" in dirt[0].what
    unnamed = dist.new_group([0])
    assert "process group 'undefined'" not in (told := snapshot.restore()[-1].what)
    assert f"process group '{unnamed.group_name}' of ranks [0]" in told
    dist.destroy_process_group(unnamed)
    # Destroyed, it is no dirt any more, although `group` still holds its connections.
    dist.destroy_process_group(group)
    assert snapshot.restore() == ()


@pytest.mark.usefixtures("single_rank_group")
def test_a_destroyed_default_group_is_named() -> None:
    snapshot = take_snapshot()
    dist.destroy_process_group()
    assert [entry.what for entry in snapshot.restore()] == ["the default process group was destroyed"]


def test_every_job_starts_from_the_same_random_numbers() -> None:
    def draw() -> tuple[float, float, float]:
        drawn = np.random.random()  # noqa: NPY002 - the global generator is what is seeded
        return random.random(), drawn, float(torch.rand(()))

    take_snapshot(seed=5)
    first = draw()
    take_snapshot(seed=5)
    assert draw() == first
    seed_generators(6)
    assert draw() != first


def test_what_the_compiler_replaces_for_good_is_no_dirt() -> None:
    namespace: dict[str, object] = {}
    code = compile("def zero_grad(self):\n    pass", "/x/torch/_dynamo/eval_frame.py", "exec")
    exec(code, namespace)
    original = torch.optim.Optimizer.zero_grad
    snapshot = take_snapshot()
    torch.optim.Optimizer.zero_grad = namespace["zero_grad"]  # type: ignore[assignment,method-assign]  # as dynamo does
    try:
        assert snapshot.restore() == ()
        assert torch.optim.Optimizer.zero_grad is namespace["zero_grad"]
    finally:
        torch.optim.Optimizer.zero_grad = original  # type: ignore[method-assign]  # put back by hand


def test_what_the_compiler_takes_away_once_it_is_reset_is_no_dirt() -> None:
    compiled = torch.compile(lambda x: _doubled(x) + 1, backend=lambda graph, _: graph.forward)
    compiled(torch.ones(1))
    names = [name for name in globals() if name.startswith("__compiled_fn_")]
    snapshot = take_snapshot()
    del compiled
    torch.compiler.reset()
    gc.collect()
    assert names and not any(name in globals() for name in names)
    assert snapshot.restore() == ()


def test_a_failing_repair_counts_as_not_restored(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    home = Path.cwd()
    os.chdir(gone)
    try:
        snapshot = take_snapshot()
        os.chdir(home)
        gone.rmdir()
        (dirt,) = snapshot.restore()
    finally:
        os.chdir(home)
    assert not dirt.restored
    assert "restoring it failed" in dirt.what


def test_what_is_accepted_stays_and_the_rest_is_put_back() -> None:
    outer = Snapshot()
    inner = take_snapshot()
    torch.set_num_threads(torch.get_num_threads() + 1)
    before = Snapshot()
    sys.setrecursionlimit(sys.getrecursionlimit() + 3)
    inner.accept(before, Snapshot())
    assert [entry.kind for entry in inner.restore()] == ["torch default"]
    assert [entry.kind for entry in outer.restore()] == ["interpreter"]


def test_every_probe_reads_equal_when_nothing_happened() -> None:
    for probe in PROBES:
        assert probe.read() == probe.read(), probe.kind
    assert take_snapshot().restore() == ()


def test_a_clean_job_costs_one_reading_of_each_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the reading takes is measured by benchmarks/pool.py; a collection alone would take a hundred times as long.
    collected: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda *_: collected.append("all"))
    readings: list[str] = []
    counted = [partial(_counted, probe.kind, probe.read, readings) for probe in PROBES]
    monkeypatch.setattr(hygiene, "_READERS", counted)
    snapshot = take_snapshot()
    readings.clear()
    assert snapshot.restore() == ()
    assert readings == [probe.kind for probe in PROBES]
    assert collected == []


def _counted(kind: str, read: Callable[[], Any], readings: list[str]) -> Any:
    readings.append(kind)
    return read()


@pytest.mark.parametrize("versions", [True, False], ids=["dictionaries have versions", "they have none"])
def test_a_namespace_is_read_again_only_when_it_was_changed(versions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_dictionaries_have_versions", lambda: versions)
    module = types.ModuleType("made")
    module.first, module.tensor = print, torch.ones(2)  # type: ignore[attr-defined]  # made here
    namespace = hygiene._Namespace(module, vars(module))
    read = namespace.read()
    assert read["first"] is print
    assert read["tensor"] is None, "no tensor is kept alive"
    assert namespace.read() is read
    module.first = len  # type: ignore[attr-defined]  # as above
    again = namespace.read()
    assert again["first"] is len
    assert read["first"] is print
    assert namespace.read() is again
    del module.first  # type: ignore[attr-defined]  # as above
    assert "first" not in namespace.read()


def _watched_beside(folder: Path, imports: str) -> list[str]:
    """Return the folder that torch comes from, and the names of what is watched, with `folder` first on the path."""
    code = (
        f"import {imports}; from fsdp_testing.ranks.pool import hygiene; import torch; "
        "print(torch.__file__, *(watched.place.__name__ for watched in hygiene._watched.current()))"
    )
    named = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=named, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_torch_in_a_checkout_is_no_code_under_test(tmp_path: Path) -> None:
    (tmp_path / "torch").symlink_to(Path(torch.__file__).parent)
    file, *watched = _watched_beside(tmp_path, "torch.overrides")
    assert file == str(tmp_path / "torch" / "__init__.py")
    assert "torch.nn.functional" in watched
    assert "torch.overrides" not in watched


def test_packages_that_were_installed_into_a_folder_are_no_code_under_test_and_modules_beside_them_are(
    tmp_path: Path,
) -> None:
    (tmp_path / "made.py").touch()
    (tmp_path / "made_too.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    info = tmp_path / "made-1.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(
        "made.py,sha256=0,0\npackage/__init__.py,,\n\n../../bin/made,,\nmade-1.0.dist-info/RECORD,,\n"
    )
    watched = _watched_beside(tmp_path, "made, made_too, package")
    assert {"made", "made_too", "package"}.intersection(watched) == {"made_too"}


def test_no_value_of_code_under_test_is_asked_for_its_class(tmp_path: Path) -> None:
    class Deprecated:
        @property
        def __class__(self) -> Any:
            raise AssertionError("asked")

        @__class__.setter
        def __class__(self, other: Any) -> None: ...

    module = types.ModuleType("made")
    module.__file__ = str(tmp_path / "made.py")
    module.old, module.Kind = Deprecated(), type("Kind", (), {"__module__": "made"})  # type: ignore[attr-defined]  # made here
    watched = hygiene._Watched()
    watched._add(module.__name__, module)
    assert [namespace.place for namespace in watched.all[-2:]] == [module, module.Kind]  # type: ignore[attr-defined]  # as above


@pytest.mark.parametrize("name", ["glob", "torch.distributed.tensor"])
def test_a_module_that_a_test_makes_impossible_to_import_is_not_watched(name: str) -> None:
    watched = hygiene._Watched()
    before = list(watched.all)
    watched._add(name, None)
    assert watched.all == before


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="dictionaries have no versions from Python 3.14 on")
def test_dictionaries_have_versions_here() -> None:
    assert compat._dictionaries_have_versions()


def test_what_libraries_register_on_first_use_is_no_leak() -> None:
    snapshot = take_snapshot()
    logging.getLogger("made.late").setLevel(5)
    contextvars.ContextVar[int]("of_a_library").set(1)
    copyreg.pickle(Fraction, Fraction.__reduce__)
    assert snapshot.restore() == ()
    del copyreg.dispatch_table[Fraction]


@pytest.mark.parametrize("compiled", [False, True])
def test_distributions_that_validate_nothing_are_told_unless_the_compiler_did_it(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    snapshot = take_snapshot()
    torch.distributions.Distribution.set_default_validate_args(False)
    if compiled:
        monkeypatch.setitem(sys.modules, "torch._dynamo", torch)
    told = [entry.what for entry in snapshot.restore()]
    assert told == ([] if compiled else ["validation of distributions: True -> False"])


def test_output_that_leads_elsewhere_replaces_the_process() -> None:
    snapshot, kept = take_snapshot(), os.dup(1)
    os.close(1)
    dirt = snapshot.restore()
    os.dup2(kept, 1)
    os.close(kept)
    assert [(entry.kind, entry.restored) for entry in dirt if entry.kind == "interpreter"] == [("interpreter", False)]
    assert "descriptors 0 to 2 lead to: added ['closed']" in dirt[0].what


def test_a_hook_that_a_library_keeps_on_optimizers_is_no_leak() -> None:
    snapshot = take_snapshot()
    handle = register_optimizer_step_post_hook(torch.nn.utils.clip_grad_norm_)  # as a function of a library
    assert snapshot.restore() == ()
    handle.remove()
