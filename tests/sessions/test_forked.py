"""A forked Python has what it was given and numbers of its own; its pool's fork server is forked too, and fails as a real one."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys

import forked
import pytest

SAYS = """
import os, sys
print(os.getcwd() == sys.path[0], sys.argv, os.environ.get("MINE"), __name__, __import__("threading").active_count())
print([name for name in ("torch", "pytest", "fsdp_testing", "fsdp_ref") if name in sys.modules], file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize(("torch", "imported"), [(True, ["torch", "pytest"]), (False, ["pytest"])])
def test_it_has_its_folder_words_environment_and_exit_code(zygote, tmp_path, torch, imported):
    done = zygote.run(tmp_path, ["-c", SAYS, "a", "b"], {"MINE": "x"}, torch=torch)
    assert done == (7, "True ['-c', 'a', 'b'] x __main__ 1\n", f"{imported}\n")


def test_each_has_random_numbers_of_its_own(zygote, tmp_path):
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    (one, other), (third, fourth) = (zygote.run(tmp_path, ["-c", code], os.environ).stdout.split() for _ in range(2))
    assert one != third, "Python's"
    assert other != fourth, "numpy's"


def test_errors_may_stand_in_its_output_and_a_module_runs_as_main(zygote, tmp_path):
    (tmp_path / "mine.py").write_text("import sys\nprint(__name__)\nprint('no', file=sys.stderr)\nraise KeyError(1)\n")
    done = zygote.run(tmp_path, ["-m", "mine"], os.environ, merged=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert {"__main__", "no", "KeyError: 1"} <= {*done.stdout.splitlines()}


def test_one_that_does_not_end_is_ended(zygote, tmp_path):
    code = "import os, threading; open('pid', 'w').write(str(os.getpid())); threading.Event().wait()"
    with pytest.raises(subprocess.TimeoutExpired):
        zygote.run(tmp_path, ["-c", code], os.environ, timeout=3.0)
    pid = int((tmp_path / "pid").read_text())
    zygote.run(tmp_path, ["-c", ""], os.environ)  # it has been waited for by then
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


RANKS = """
import os, pathlib, pytest

@pytest.mark.world(2)
def test_it(world):
    command = pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    assert b"forked.py" in command and world.size == 2
"""


def test_the_fork_server_of_its_pool_is_forked_too(zygote, tmp_path):
    (tmp_path / "test_it.py").write_text(RANKS)
    done = zygote.run(tmp_path, ["-m", "pytest", "-q", "-p", "no:cacheprovider"], os.environ)
    assert done.returncode == 0, done.stdout + done.stderr


CRASHES = """
import os
with open("begun", "a") as stream:
    stream.write("x")
os._exit(3)
"""
PRELOADS = "from fsdp_testing.ranks.pool import default_pool\ndefault_pool().add_preload('crashes')\n"


def real(folder, words, environment):
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_fork_server_that_crashes_while_importing_is_begun_once(zygote, tmp_path, is_forked):
    (tmp_path / "crashes.py").write_text(CRASHES)
    (tmp_path / "conftest.py").write_text(PRELOADS)
    (tmp_path / "test_it.py").write_text(RANKS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = (zygote.run if is_forked else real)(tmp_path, words, environment)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"it ended while importing \(process (ended with 3|still running)\)", done.stdout), done.stdout
    assert (tmp_path / "begun").read_text() == "x"


@pytest.mark.parametrize(
    ("message", "room"),
    [(b"", True), (b'"%s"' % (b"x" * forked._MESSAGE_BYTES), True), (b'{"words": []}', False)],
    ids=["sender was killed", "too long", "no room for a process"],
)
def test_a_request_that_cannot_be_met_is_answered_by_the_end_of_its_connection(monkeypatch, message, room):
    def fork():
        raise AssertionError("it forks for a bad request") if room else BlockingIOError("no process is left")

    monkeypatch.setattr(forked.os, "fork", fork)
    requests = object.__new__(forked._Requests)
    name = f"\0{secrets.token_hex(8)}"
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as requests._listening, asking:
        requests._listening.bind(name)
        requests._listening.listen()
        asking.connect(name)
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * len(message))
        ours, theirs = os.pipe()
        if message:
            socket.send_fds(asking, [message], [theirs])
        else:
            asking.shutdown(socket.SHUT_WR)
        os.close(theirs)
        assert requests._fork() is None
        assert asking.recv(64) == b""
        assert os.read(ours, 1) == b"", "its descriptors are closed"
        os.close(ours)


def test_after_a_bad_request_others_are_met(zygote, tmp_path):
    with pytest.raises(EOFError, match="cannot read the request"):
        zygote.run(tmp_path, ["-c", "x" * forked._MESSAGE_BYTES], {}, torch=False)
    assert zygote.run(tmp_path, ["-c", "print(1)"], {}, torch=False) == (0, "1\n", "")
