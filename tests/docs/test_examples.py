"""The adapters in examples/, where the packages that they adapt are not installed, and where they are.

`test_it_loads...` needs the package of the adapter beside fsdp-testing (accelerate 1.15, deepspeed 0.19) and says so where
it is missing; every other test needs nothing.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "adapters"
FILES = sorted(FOLDER.glob("*.py"))
ADAPTERS = {
    "accelerate_fsdp2": ("accelerate", ("IMPLEMENTATION",)),
    "deepspeed_zero": ("deepspeed", ("ZERO_1", "ZERO_2")),
}
ALLOWED = {"torch", "fsdp_testing", "accelerate", "deepspeed"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_imports_what_its_table_names(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    foreign = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert foreign <= ALLOWED
    assert f"`{file.name}`" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_every_adapter_has_its_verdict() -> None:
    page = (FOLDER.parents[1] / "docs/third-parties.md").read_text(encoding="utf-8")
    for adapter, (_, names) in ADAPTERS.items():
        assert all(f"fsdp-verify run {adapter}:{name}" in page for name in names)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_it_loads_with_claims_that_have_methods(adapter: str) -> None:
    package, names = ADAPTERS[adapter]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package} beside fsdp-testing; examples/adapters/README.md says which version")
    code = (
        "from fsdp_testing.adapters import registry, validation\n"
        f"for name in {names}: validation.check_claims(registry.load(f'{adapter}:{{name}}'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
