"""The guide's adapter is what it is said to be: short, complete, and about somebody else's implementation.

That its commands give what the guide shows is checked with every other document's (test_code_blocks.py).
"""

from __future__ import annotations

import re
from pathlib import Path

from fsdp_testing.adapters.adapter import TorchStyle
from fsdp_testing.adapters.defaults import OPTIONAL_WITHOUT_DEFAULT

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- file=(\S+) -->\n```python\n(.*?)```", GUIDE, re.S))


def test_the_adapter_takes_less_than_forty_lines():
    assert len(FILES["acme_adapter.py"].splitlines()) < 40


def test_the_implementation_knows_nothing_of_the_harness():
    assert "fsdp_testing" not in FILES["acme.py"]


def test_every_method_of_an_adapter_is_in_the_guide():
    fields = set(TorchStyle.__dataclass_fields__) - {"name", "capabilities", "source"}
    assert sorted(method for method in fields if f"`{method}" not in GUIDE) == []
    assert set(OPTIONAL_WITHOUT_DEFAULT) <= fields
