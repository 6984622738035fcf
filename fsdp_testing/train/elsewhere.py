"""Starts a script in another environment, or from another commit, to compare it with this version."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.ranks.pool import Pool, WorldOutcome, default_pool
from fsdp_testing.train.running import Undecided

if TYPE_CHECKING:
    from fsdp_testing.train.on_rank import RunSettings
    from fsdp_testing.train.running import Start

_REQUIRED = ("fsdp-testing", "torch")
_VERSIONS = (
    "import json\nfrom importlib import metadata\nversions = {}\n"
    f"for name in {_REQUIRED}:\n    try: versions[name] = metadata.version(name)\n"
    "    except metadata.PackageNotFoundError: pass\n"
    "print(json.dumps(versions))"
)
_LINES_SHOWN = 8
"""Lines of an interpreter's output that are shown if it does not answer."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where a script is started.

    Attributes:
        name: As the user wrote it; empty for the place where we are.
        python: Another interpreter; empty for this one.
        moved: A repository, and the folder that has its files of another commit; empty without one.
    """

    name: str = ""
    python: str = ""
    moved: tuple[str, str] = ("", "")

    def moved_path(self, path: Path) -> Path:
        """Return a file's or folder's path in the other commit; unchanged without a commit, or outside the repository."""
        root, checkout = self.moved
        there = Path(checkout) / path.relative_to(root) if root and path.is_relative_to(root) else path
        return there if there.exists() else path


@contextmanager
def elsewhere(target: str, script: str, pool: Pool) -> Iterator[Elsewhere]:
    """Find the environment, or check the commit out to a folder that is removed afterwards.

    Args:
        target: An interpreter, the folder of an environment, or a commit of the script's repository.
        script: Path of the script, or name of its module.
        pool: Makes the folder.

    Raises:
        InvalidArgument: It is none of these, or lacks something that is needed.
    """
    path = Path(target)
    if path.exists():
        python = _interpreter(path)
        try:
            yield Elsewhere(target, python)
        finally:
            if python in _sessions:
                _sessions.pop(python).close()
        return
    place = Path(script).resolve().parent if Path(script).is_file() else Path.cwd()
    root = _git(place, "rev-parse", "--show-toplevel")
    if not root:
        raise InvalidArgument(
            f"against: expected an interpreter, the folder of an environment, or a commit, got {target!r}, and {place} is in no "
            "git repository. Correct the path."
        )
    commit = _git(place, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{target}^{{commit}}")
    if not commit:
        raise InvalidArgument(
            f"against: expected an interpreter, the folder of an environment, or a commit of {root}, got {target!r}. "
            f"See `git -C {root} log --oneline`."
        )
    folder = Path(pool.shared_directory("fsdp-verify-commit-"))
    try:
        with subprocess.Popen(["git", "-C", root, "archive", commit], stdout=subprocess.PIPE) as archive:
            unpacked = subprocess.run(["tar", "-x", "-C", str(folder)], stdin=archive.stdout, check=False)
        if archive.returncode or unpacked.returncode:
            raise InvalidArgument(f"against: {commit} cannot be checked out: see `git -C {root} archive {target}`.")
        commit_files = Elsewhere(target, "", (str(Path(root).resolve()), str(folder.resolve())))
        if Path(script).is_file() and commit_files.moved_path(Path(script).resolve()) == Path(script).resolve():
            raise InvalidArgument(f"against: {script} is not in commit {target}. Name a commit that has it.")
        yield commit_files
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _git(place: Path, *arguments: str) -> str:
    """Return git's output for a folder's repository; empty without a repository or git."""
    try:
        answered = subprocess.run(["git", "-C", str(place), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return answered.stdout.strip() if answered.returncode == 0 else ""


def _interpreter(path: Path) -> str:
    """Return the interpreter of an environment, which must have the needed packages.

    Raises:
        InvalidArgument: It lacks something.
    """
    python = path / "bin" / "python" if path.is_dir() else path
    try:
        answered = subprocess.run(
            [str(python), "-c", _VERSIONS], capture_output=True, text=True, check=False, timeout=60
        )
        versions = json.loads(answered.stdout) if answered.returncode == 0 else None
    except (OSError, ValueError, subprocess.SubprocessError):
        versions = None
    if not isinstance(versions, dict):
        raise InvalidArgument(f"against: expected an environment with bin/python, got {path}. Correct the path.")
    mine = metadata.version("fsdp-testing")
    lacking = [name for name in _REQUIRED if name not in versions]
    if lacking or versions["fsdp-testing"] != mine:
        there = f"lacks {' and '.join(lacking)}" if lacking else f"has fsdp-testing {versions['fsdp-testing']}"
        raise InvalidArgument(
            f"against: {path} {there}, and needs the version that is here. Type "
            f"`{python} -m pip install torch fsdp-testing=={mine}`."
        )
    return str(python)


class _Session:
    """An interpreter of another environment that runs what it is sent until it is closed."""

    def __init__(self, python: str) -> None:
        self.python = python
        self._here, there = Pipe()
        self._process = subprocess.Popen(
            [python, "-c", f"from {__name__} import answer; answer({there.fileno()})"],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        there.close()

    def ask(self, request: tuple[Start, int, RunSettings]) -> WorldOutcome:
        """Make a prepared run there.

        Raises:
            Undecided: It does not answer.
        """
        try:
            self._here.send_bytes(pickle.dumps(request))
            if not self._here.poll(2 * request[0].timeout + _PATIENCE):
                raise Undecided(f"{self.python} did not answer. Run the script there by itself.")
            outcome: WorldOutcome = pickle.loads(self._here.recv_bytes())  # noqa: S301  # of our own child
        except (OSError, EOFError, pickle.PickleError, AttributeError, ImportError) as why:
            self._process.kill()
            _, output_bytes = self._process.communicate()
            lines = output_bytes.decode(errors="replace").splitlines()[-_LINES_SHOWN:]
            output = tuple(f"stderr of {self.python}: {line}" for line in lines)
            raise Undecided(f"{self.python} did not run it ({type(why).__name__}). Fix its error.", output) from why
        return outcome

    def close(self) -> None:
        """End the interpreter; its ranks end with it."""
        self._here.close()
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


_PATIENCE = 120.0
"""Seconds for a start of ranks, beside twice the time after which they count as hung."""
_sessions: dict[str, _Session] = {}


def execute_elsewhere(python: str, start: Start, size: int, run: RunSettings) -> WorldOutcome:
    """Run a start on a world of another environment, and return what its ranks did.

    Raises:
        Undecided: The environment does not answer, or lacks a module.
    """
    if python not in _sessions:
        _sessions[python] = _Session(python)
    outcome = _sessions[python].ask((start, size, run))
    errors = [rank.error for rank in outcome.ranks if rank.error is not None]
    missing = [error for error in errors if error.type_name == "ModuleNotFoundError"]
    if missing:
        raise Undecided(f"{python}: {missing[0].message}. Install there what the script imports.")
    return outcome


def answer(number: int) -> None:
    """Make the runs that arrive on a connection until it is closed."""
    with Connection(number) as there:
        while True:
            try:
                start, size, run = pickle.loads(there.recv_bytes())  # noqa: S301  # of our own parent
            except EOFError:
                break
            there.send_bytes(pickle.dumps(start.execute(default_pool(), size, run)))
    default_pool().close()
