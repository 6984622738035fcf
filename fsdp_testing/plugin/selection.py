"""Chooses the tests that run on ranks, and their worlds, from markers, options and nodes; the same in controller and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fsdp_testing.base.backends import registered_backends
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.plugin import pytest_compat
from fsdp_testing.plugin.marker import Defaults, Request, WorldRequest, read_defaults, read_marker

SIZE_FIXTURE = "fsdp_world_size"


def defaults_of(config: pytest.Config) -> Defaults:
    """Return the command line's defaults.

    Raises:
        InvalidArgument: Lists every wrong option.
    """
    option = config.option
    given = (option.world_size, option.dist_backend, option.rank_timeout, option.isolation)
    return read_defaults(*given, registered_backends())


def request_of(node: Any) -> Request | None:
    """Return the request of a node's closest `world` marker; None without a marker.

    Raises:
        InvalidArgument: The marker's arguments are wrong.
    """
    mark = node.get_closest_marker("world")
    if mark is None:
        return None
    where = f"{node.nodeid}: marker world"
    defaults = defaults_of(node.config)
    return read_marker(mark.args, mark.kwargs, where=where, defaults=defaults, backends=registered_backends())


def parametrize_sizes(metafunc: pytest.Metafunc) -> None:
    """Give a test one id for each size that its marker lists, such as `[world=2]`."""
    try:
        request = request_of(metafunc.definition)
    except InvalidArgument as error:
        raise pytest.Collector.CollectError(str(error)) from None
    if request is not None and request.listed:
        metafunc.fixturenames.append(SIZE_FIXTURE)
        ids = [f"world={size}" for size in request.sizes]
        metafunc.parametrize(SIZE_FIXTURE, request.sizes, ids=ids, indirect=True)


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common start of two chains of nodes."""
    count = 0
    for left, right in zip(first, second, strict=False):
        if left is not right:
            break
        count += 1
    return count


def location_of(item: pytest.Item) -> tuple[str, int]:
    """Return the file and the line, from 1, of a test."""
    return str(item.path), (item.location[1] or 0) + 1


def collected_id(item: pytest.Item) -> str:
    """Return the id that every process gives an item when it collects it, whatever plugins append to it later."""
    own, collected = item.nodeid, f"{item.parent.nodeid}::{item.name}" if item.parent is not None else item.nodeid
    return own if own == collected else collected  # the item's own text, which a rank keeps anyway, rather than another


def world_request(item: pytest.Item) -> WorldRequest:
    """Return the one world that a marked item runs on.

    Raises:
        InvalidArgument: The marker's arguments are wrong, or sizes are listed where they cannot become ids.
    """
    request = request_of(item)
    if request is None:
        raise InvalidArgument(f"{item.nodeid}: expected a test with the marker world, got one without.")
    callspec = getattr(item, "callspec", None)
    size = callspec.params.get(SIZE_FIXTURE) if callspec is not None else None
    if size is None and len(request.sizes) > 1:
        raise InvalidArgument(
            f"{item.nodeid}: marker world: expected one size, got {list(request.sizes)} in a place where a list cannot "
            "become test ids (a unittest.TestCase, or a mark inside pytest.param). Give one size there."
        )
    return request.at(size if size is not None else request.sizes[0])


def size_words(item: pytest.Item) -> set[str]:
    """Return the word by which `-k` selects a marked item by its size; none if the marker is wrong."""
    try:
        return {f"world{world_request(item).size}"}
    except InvalidArgument:
        return set()  # reported with the tests that cannot run


def refusal_to_draw(item: pytest.Item) -> str | None:
    """Return why a Hypothesis test cannot run on ranks; None for other tests, or if it draws the same examples everywhere."""
    function: Any = getattr(item, "obj", None)
    if not getattr(function, "is_hypothesis_test", False) or pytest_compat.draws_alike_everywhere(function):
        return None
    return (
        "expected a test that does the same on every rank, got a Hypothesis test, which would draw different "
        "examples on each. Draw in the controlling process: remove the marker and call worlds(size=2).run(function, "
        "example); or set @settings(derandomize=True)."
    )
