"""Sphinx reads the pages where they are, so links work here as they do on GitHub: `tox -e docs`."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = PROJECT["name"]
release = PROJECT["version"]
extensions = ["myst_parser", "sphinx_external_toc", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["*.md", "docs/**.md", "examples/*/README.md"]
external_toc_path = "docs/site/toc.yml"
html_theme = "furo"
html_title = "fsdp-testing"
html_show_copyright = False
html_copy_source = False
html_static_path = ["static"]
html_favicon = "static/icon.svg"
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]

myst_heading_anchors = 4
default_role = "code"  # docstrings quote code as Markdown does, in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
