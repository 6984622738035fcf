"""Imports go one way: the contracts of ci/layers.toml, the reserved modules of ci/architecture.toml, and no cycle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from private_names import private_names_defined, private_offences
from tree_rules import (
    PACKAGES,
    ROOT,
    import_cycle,
    module_name,
    python_files,
    reserved_import_offences,
    settings,
    stdlib_only_offences,
)

RULES = settings()
PRIVATE = {entry["file"] for entry in RULES["private"]}
FILES = python_files(*PACKAGES)


def _source(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_import_contracts_are_kept() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    done = subprocess.run(
        [*command, "--config", "ci/layers.toml", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_every_package_has_a_place_among_the_layers() -> None:
    text = (ROOT / "ci/layers.toml").read_text(encoding="utf-8")
    for package in PACKAGES:
        children = {path.parts[1].removesuffix(".py") for path in python_files(package)} - {"__init__"}
        missing = [child for child in sorted(children) if child not in _layer_names(text)]
        assert not missing, f"{package}: give {missing} a layer in ci/layers.toml"


def _layer_names(text: str) -> set[str]:
    return set(text.replace("(", " ").replace(")", " ").replace('"', " ").replace("|", " ").replace(",", " ").split())


def test_reserved_modules_stay_where_they_belong() -> None:
    found = [o for path in FILES for o in reserved_import_offences(str(path), _source(path), RULES["reserved"])]
    assert not found, "\n".join(map(str, found))


def test_pure_packages_need_the_standard_library_alone() -> None:
    found = [o for path in FILES for o in stdlib_only_offences(str(path), _source(path), RULES["stdlib_only"])]
    assert not found, "\n".join(map(str, found))


def test_private_names_of_others_stand_in_listed_files() -> None:
    ours = private_names_defined(map(_source, FILES))
    found = [offence for path in FILES for offence in private_offences(str(path), _source(path), ours)]
    left = [offence for offence in found if offence.path not in PRIVATE]
    assert not left, "\n".join(map(str, left))
    stale = PRIVATE - {offence.path for offence in found}
    assert not stale, f"ci/architecture.toml lists what no longer uses private names: {sorted(stale)}"
    assert all(len(entry["reason"]) > 20 for entry in RULES["private"])


def test_no_import_cycle() -> None:
    cycle = import_cycle({module_name(path): _source(path) for path in FILES})
    assert cycle is None, " -> ".join(cycle)


def test_a_cycle_is_found_and_named() -> None:
    sources = {"a": "from b import x", "b": "import c", "c": "import a", "d": "import a"}
    assert set(import_cycle(sources) or []) == {"a", "b", "c"}
    assert import_cycle({"a": "import b", "b": "def f():\n    import a"}) is None
    package = {"p": "from p.api import f", "p.api": "from p import compat", "p.compat": ""}
    assert import_cycle(package) is None, "a submodule is taken from a package that is still being imported"
    assert import_cycle({**package, "p.api": "from p import compat, name"}) is not None


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("fsdp_testing/ranks/pool/x.py", "import pytest"),
        ("fsdp_testing/ranks/pool/x.py", "def f():\n    from _pytest.nodes import Item"),
        ("fsdp_testing/report/x.py", "import torch"),
        ("fsdp_testing/checks/suites/x.py", "from fsdp_ref.layout import Span"),
        ("fsdp_testing/checks/suites/x.py", "import fsdp_ref"),
        ("fsdp_ref/runtime/x.py", "from torch.distributed import fsdp"),
        ("fsdp_ref/storage/x.py", "import torch.distributed as dist"),
    ],
)
def test_each_reserved_import_can_be_broken(path: str, source: str) -> None:
    assert list(reserved_import_offences(path, source, RULES["reserved"]))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("fsdp_testing/plugin/x.py", "import pytest"),
        ("fsdp_testing/adapters/ref/x.py", "import fsdp_ref"),
        ("fsdp_ref/comm/x.py", "import torch.distributed as dist"),
        ("fsdp_testing/adapters/x.py", "import torch.distributed.fsdp"),
    ],
)
def test_owners_of_reserved_modules_may_import_them(path: str, source: str) -> None:
    assert not list(reserved_import_offences(path, source, RULES["reserved"]))


def test_the_other_import_rules_can_be_broken() -> None:
    assert list(stdlib_only_offences("fsdp_ref/layout.py", "import torch", RULES["stdlib_only"]))
    assert list(stdlib_only_offences("fsdp_ref/layout.py", "from fsdp_ref.storage import y", RULES["stdlib_only"]))
    assert not list(stdlib_only_offences("fsdp_ref/layout.py", "import math", RULES["stdlib_only"]))
    later = "def f():\n    import torch"
    assert list(stdlib_only_offences("fsdp_testing/cases/operations/x.py", "import torch", RULES["stdlib_only"]))
    assert not list(stdlib_only_offences("fsdp_testing/cases/operations/x.py", later, RULES["stdlib_only"]))
    assert list(stdlib_only_offences("fsdp_ref/layout.py", later, RULES["stdlib_only"]))


@pytest.mark.parametrize(
    "source",
    [
        "from torch._C import y",
        "import torch\ntorch._foreach_add_(a, b)",
        "import torch.distributed.fsdp._flat_param as flat",
        "import torch.distributed as d\nd._functional_collectives.wait_tensor(x)",
        "from torch.distributed import fsdp as f\nf._runtime_utils.x()",
        "from torch.distributed import fsdp\nhere = fsdp.api\nhere._private()",
        "import torch\nengine = torch.autograd.Variable\nengine._ours",
        "def f(unit):\n    return unit._sharded_state",
        "def f(unit):\n    return getattr(unit, '_fsdp_param_groups', None)",
        "def f(unit):\n    setattr(unit, '_is_root', True)",
        "import pytest\ndef f(config: pytest.Config):\n    return config._tmp_path_factory",
        "SCRIPT = '''\nimport torch\ntorch._foreach_add_(a, b)\n'''",
        "SCRIPT = '''\ndef held(module):\n    return module._get_fsdp_state()\n'''",
    ],
)
def test_private_names_are_seen_through_aliases_strings_and_scripts(source: str) -> None:
    assert list(private_offences("fsdp_testing/x.py", source, frozenset({"_ours"})))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "class A:\n    def f(self, other):\n        return self._ours + other._ours",
        "import os\nos._exit(1)",
        "TEXT = '''\nnot Python, and _private\n'''",
        "import torch\nx = torch.nn\nx.Linear",
    ],
)
def test_what_is_ours_or_public_is_left_alone(source: str) -> None:
    assert not list(private_offences("fsdp_testing/x.py", source, frozenset({"_ours"})))


def test_the_entry_point_of_the_plugin_is_light() -> None:
    """Every pytest run of every project that has us installed pays for this import."""
    heavy = {"torch", "numpy", "rich", "jinja2", "hypothesis"}
    code = f"import sys, fsdp_testing.plugin; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
