"""Fixtures of all tests: pytest in a subprocess, with this project's plugin, whatever the outer run measures."""

from __future__ import annotations

pytest_plugins = ["pytester"]
