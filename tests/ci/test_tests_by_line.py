"""Which tests meet a mutant: the map from lines to tests, and the lines that a change belongs to (ci/tests_by_line.py)."""

import os

import pytest
import tests_by_line
from tests_by_line import TESTS, TestsByLine, node_id, statement_lines

pytestmark = pytest.mark.slow  # about a script that people start by hand, not about the packages

SOURCE = """\
def first(a, b=1):
    if a and (
        b
    ):
        return [
            a,
            b,
        ]
    return a
"""


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        pytest.param(1, (1, 9), id="a default belongs to all of the function"),
        pytest.param(3, (2, 4), id="a condition to its head, not to what it guards"),
        pytest.param(7, (5, 8), id="an item to the whole statement"),
        pytest.param(9, (9, 9), id="one line to itself"),
    ],
)
def test_lines_of_the_statement(line, lines):
    found = statement_lines(SOURCE, line, line)
    assert (found[0], found[-1]) == lines


@pytest.fixture
def by_line():
    """Three tests; one belongs to the folder of the file, the other two execute less of it."""
    own, narrow, wide = (
        f"{TESTS}/comm/test_a.py::test_own",
        f"{TESTS}/b/test_b.py::test_n",
        f"{TESTS}/b/test_b.py::test_w",
    )
    lines = {5: {own, wide, ""}, 6: {narrow, wide, own}, 7: {""}}
    return TestsByLine(
        {"fsdp_ref/comm/x.py": {line: frozenset(tests) for line, tests in lines.items()}},
        {own: 90, narrow: 10, wide: 50, "": 3},
    )


def test_the_folders_own_tests_come_first_then_the_narrow_ones(by_line):
    found = by_line.executing("fsdp_ref/comm/x.py", (5, 6))
    assert [test.rpartition("::")[2] for test in found] == ["test_own", "test_n", "test_w"]


def test_what_runs_only_outside_of_tests_meets_all_of_them_and_what_never_runs_none(by_line):
    assert by_line.executing("fsdp_ref/comm/x.py", (7,)) == (TESTS,)
    assert by_line.executing("fsdp_ref/comm/x.py", (8,)) == ()
    assert by_line.executing("fsdp_ref/comm/y.py", (5,)) == ()


def test_names_of_contexts(tmp_path):
    (tmp_path / "tests/a").mkdir(parents=True)
    (tmp_path / "tests/a/test_b.py").touch()
    assert node_id(tmp_path, "tests.a.test_b.test_c") == "tests/a/test_b.py::test_c"
    assert node_id(tmp_path, "tests.a.test_b.TestD.test_c") == "tests/a/test_b.py::TestD::test_c"
    (tmp_path / "elsewhere.py").touch()
    assert not node_id(tmp_path, "elsewhere.test_c")
    assert not node_id(tmp_path, "")


def test_lines_that_ranks_execute_are_told_with_their_tests(tmp_path):
    """On a small tree of the same shape: what one rank of two executes counts, and so does what the controller does."""
    package, tests = tmp_path / "fsdp_ref", tmp_path / TESTS
    package.mkdir()
    tests.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "x.py").write_text("def doubled(number):\n    return 2 * number\n\n\ndef never():\n    return 0\n")
    (tests / "test_x.py").write_text(
        "import pytest\nfrom fsdp_ref.x import doubled\n\n\n"
        "@pytest.mark.world(2)\ndef test_on_ranks(world):\n    assert world.rank == 0 or doubled(1) == 2\n\n\n"
        "def test_here():\n    assert doubled(2) == 4\n\n\ndef test_without():\n    pass\n"
    )
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = --import-mode=importlib\nmarkers =\n    slow: none\n    gpu: none\n"
    )
    scratch = tmp_path / "data"
    scratch.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COV_", "PYTEST_"))}
    found = tests_by_line.measured(tmp_path, scratch, {**environment, "PYTHONPATH": str(tmp_path)})
    place = f"{TESTS}/test_x.py"
    assert set(found.executing("fsdp_ref/x.py", [2])) == {f"{place}::test_on_ranks", f"{place}::test_here"}
    assert found.executing("fsdp_ref/x.py", [6]) == ()
    tests_by_line.saved(found, tmp_path / "kept.json", "now")
    assert tests_by_line.loaded(tmp_path / "kept.json", "now") == found
    assert tests_by_line.loaded(tmp_path / "kept.json", "later") is None
    (tests / "test_x.py").write_text("def test_wrong():\n    assert not 1\n")
    with pytest.raises(RuntimeError, match="expected tests that pass without any change"):
        tests_by_line.measured(tmp_path, scratch, {**environment, "PYTHONPATH": str(tmp_path)})
