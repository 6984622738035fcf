"""Compiles the extension once for each torch, compiler and source, into the cache of torch's own extensions.

`torch.utils.cpp_extension.load` would be enough, but it needs ninja, and the file that it locks with stays behind when a
process is killed while it compiles: the next one waits for ever. A lock that the kernel holds goes with its process.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
_PROMISE = "the simulated device is compiled on first use, and the compiler"
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-shared", "-w")  # -O0: half the time, and the work is torch's


class CannotBuild(Exception):
    """Why there is no extension, in one sentence."""


def _no_word_of_cuda(record: logging.LogRecord) -> bool:
    """A torch made for CUDA says on import that it finds none, which is no concern of this device."""
    return "CUDA" not in record.getMessage()


def library() -> Path:
    """The compiled extension; compiles it if nobody has. Several processes may ask at once.

    Raises:
        CannotBuild: Without a compiler, or where it refuses.
    """
    import torch

    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.addFilter(_no_word_of_cuda)
    from torch.utils import cpp_extension

    logger.removeFilter(_no_word_of_cuda)
    compiler = cpp_extension.get_cxx_compiler()
    key = hashlib.sha256("\0".join([torch.__version__, compiler, *FLAGS, SOURCE.read_text()]).encode()).hexdigest()
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()) / "simdevice"
    path = folder / f"{key[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(compiler, path, cpp_extension.include_paths(), cpp_extension.library_paths())
    return path


def _compile(compiler: str, path: Path, includes: list[str], libraries: list[str]) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}")
    where = [*(f"-I{folder}" for folder in includes), *(f"-L{folder}" for folder in libraries)]
    command = [compiler, *FLAGS, *where, str(SOURCE), "-o", str(unfinished), "-ltorch_cpu", "-lc10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise CannotBuild(f"{_PROMISE} {compiler!r} does not run: {error.strerror}") from error
    if done.returncode != 0:
        unfinished.unlink(missing_ok=True)
        wrong = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
        raise CannotBuild(f"{_PROMISE} {compiler!r} refuses its source: {wrong}")
    unfinished.replace(path)
