"""Where ci/downstream.py --borrow finds the packages that it does not build."""

from __future__ import annotations

import downstream


def test_an_environment_that_looks_into_another_lends_what_both_hold():
    path = ["/made/ci", "/usr/lib/python3.11", "/made/own/lib/python3.11/site-packages", "/made/checkout"]
    path += ["/made/other/lib/python3.11/site-packages", "/usr/lib/python3/dist-packages"]
    assert downstream.installed_from(path) == [path[2], path[4], path[5]]
