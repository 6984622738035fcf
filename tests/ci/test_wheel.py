"""What users download stays small; whoever makes it larger sees by how much."""

from __future__ import annotations

import bz2
import json
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_BYTES = 1_505_000
"""The aim is one million: the code of both packages, compressed, has 1.3 million."""


def test_the_wheel_holds_the_packages_and_the_pages_that_messages_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="builds the wheel in place, without a new environment")
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["build"])
    from build_backend import build_wheel

    wheel = tmp_path / build_wheel(str(tmp_path))
    sizes = {entry.filename: entry.compress_size for entry in zipfile.ZipFile(wheel).infolist()}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:10]
    assert wheel.stat().st_size <= MOST_BYTES, f"{wheel.stat().st_size:,} bytes; the largest are {largest}"
    packages = ("fsdp_ref/", "fsdp_testing/", "fsdp_testing-")
    assert [name for name in sizes if not name.startswith(packages) or ".data/" in name] == []
    for name in ("fsdp_testing/cli/names.json", "fsdp_testing/report/page/page.html", "fsdp_testing/py.typed"):
        assert name in sizes
    pages = {name.removeprefix("fsdp_testing/") for name in sizes}
    assert {"docs/exit-codes.md", "docs/findings.json.bz2"} <= pages
    assert not any(name.startswith("docs/findings/") for name in pages)
    with zipfile.ZipFile(wheel) as files:
        findings = json.loads(bz2.decompress(files.read("fsdp_testing/docs/findings.json.bz2")))
        record = files.read(next(name for name in sizes if name.endswith("/RECORD"))).decode()
    packed = {"fsdp1-frozen-units.md", "scripts/fsdp1-frozen-units.py", "known_failures.toml"}
    assert {f"docs/findings/{name}" for name in packed} <= {*findings}
    assert sorted(line.split(",")[0] for line in record.splitlines()) == sorted(sizes)
    assert not any(name.startswith(("docs/tutorials", "docs/certificates", "docs/pictures")) for name in pages)
