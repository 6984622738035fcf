"""Packages that the plugin alone does not need, and the extra of `fsdp-testing` that installs each."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

from fsdp_testing.errors import MissingExtra

EXTRAS = {"hypothesis": "verify", "rich": "train", "jinja2": "report"}
"""The smallest extra; `verify` holds all three, `report` holds rich too."""


@contextlib.contextmanager
def needed(*names: str) -> Iterator[None]:
    """Import these packages; if one is missing, here or in the body, name its extra.

    Raises:
        MissingExtra: One of `EXTRAS` is not installed.
    """
    try:
        for name in names:
            importlib.import_module(name)
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        message = f"expected {package}, got no such package: run `pip install 'fsdp-testing[{EXTRAS[package]}]'`"
        raise MissingExtra(message) from error
