"""A forked Python is as a new one, but for what it need not import again; its pool's fork server is forked too."""

from __future__ import annotations

import os
import subprocess

import pytest

SAYS = """
import os, sys
print(os.getcwd() == sys.path[0], sys.argv, os.environ.get("MINE"), __name__, __import__("threading").active_count())
print([name for name in ("torch", "pytest", "fsdp_testing", "fsdp_ref") if name in sys.modules], file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize(("torch", "imported"), [(True, ["torch", "pytest"]), (False, ["pytest"])])
def test_it_has_its_folder_words_environment_and_exit_code(nursery, tmp_path, torch, imported):
    done = nursery.run(tmp_path, ["-c", SAYS, "a", "b"], {"MINE": "x"}, torch=torch)
    assert done == (7, "True ['-c', 'a', 'b'] x __main__ 1\n", f"{imported}\n")


def test_errors_may_stand_in_its_output_and_a_module_runs_as_main(nursery, tmp_path):
    (tmp_path / "mine.py").write_text("import sys\nprint(__name__)\nprint('no', file=sys.stderr)\nraise KeyError(1)\n")
    done = nursery.run(tmp_path, ["-m", "mine"], os.environ, merged=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert {"__main__", "no", "KeyError: 1"} <= {*done.stdout.splitlines()}


def test_one_that_does_not_end_is_ended(nursery, tmp_path):
    code = "import os, threading; open('pid', 'w').write(str(os.getpid())); threading.Event().wait()"
    with pytest.raises(subprocess.TimeoutExpired):
        nursery.run(tmp_path, ["-c", code], os.environ, timeout=3.0)
    pid = int((tmp_path / "pid").read_text())
    nursery.run(tmp_path, ["-c", ""], os.environ)  # it has been waited for by then
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


RANKS = """
import os, pathlib, pytest

@pytest.mark.world(2)
def test_it(world):
    command = pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    assert b"forked.py" in command and world.size == 2
"""


def test_the_fork_server_of_its_pool_is_forked_too(nursery, tmp_path):
    (tmp_path / "test_it.py").write_text(RANKS)
    done = nursery.run(tmp_path, ["-m", "pytest", "-q", "-p", "no:cacheprovider"], os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
