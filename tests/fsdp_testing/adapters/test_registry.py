"""Names lead to implementations, and every way in which they may not does so with one message."""

from __future__ import annotations

import dataclasses
import pickle
from importlib import metadata

import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.errors import InvalidArgument, InvalidImplementation, UnknownImplementation

ADAPTER = """
from fsdp_testing.adapters.adapter import TorchStyle
def make(name="mine"):
    return TorchStyle(name=name, wrap=lambda m, s: m, capabilities=frozenset({"no_shard"}))
mine = make()
as_string = "{module}:mine"
endless = "{module}:endless"
raising = lambda: 1 / 0
leaving = lambda: exit("bye")
number = 7
class holder:
    inner = mine
"""


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    """A module of somebody else's adapters, importable for one test."""
    module = f"adapters_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(ADAPTER.replace("{module}", module))
    (tmp_path / f"{module}_broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / f"{module}_leaving.py").write_text("import sys\nsys.exit('bye')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return module


def register(monkeypatch, *entries: tuple[str, str, str]) -> None:
    """Pretend that distributions with these `(distribution, name, value)` entry points are installed."""

    class Point:
        def __init__(self, distribution: str, name: str, value: str) -> None:
            self.name, self.value = name, value
            self.dist = type("Distribution", (), {"name": distribution})()

    points = [Point(*entry) for entry in entries]
    monkeypatch.setattr(
        metadata, "entry_points", lambda *, group: points if group == registry.ENTRY_POINT_GROUP else []
    )


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_built_in_names_load_under_their_own_name(name):
    adapter = registry.load(name)
    assert isinstance(adapter, Adapter)
    assert adapter.name == name
    assert adapter.source


@pytest.mark.parametrize("path", ["mine", "make", "as_string", "holder.inner"])
def test_import_strings_lead_to_objects_factories_strings_and_attributes(adapters, path):
    assert registry.load(f"{adapters}:{path}").name == "mine"


def test_near_names_are_offered():
    with pytest.raises(UnknownImplementation, match=r"got 'torch-fdsp2'. Did you mean 'torch-fsdp2'"):
        registry.load("torch-fdsp2")
    with pytest.raises(UnknownImplementation, match="Give one of these or an import string"):
        registry.load("zzzzzz")


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(InvalidArgument, match="expected a name or"):
        registry.load(name)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("{m}_broken:x", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("{m}:nothing", "AttributeError"),
        ("{m}:endless", "import strings that lead to one another"),
        ("{m}_leaving:x", "SystemExit: bye"),
        ("{m}:leaving", "SystemExit: bye"),
        ("{m}:raising", "ZeroDivisionError"),
        ("{m}:number", "expected `name`, `capabilities` and `wrap`"),
        ("{m}:", "expected `package.module:attribute`"),
        (":mine", "expected `package.module:attribute`"),
    ],
)
def test_what_cannot_be_loaded_says_why(adapters, path, said):
    with pytest.raises(InvalidImplementation) as caught:
        registry.load(path.format(m=adapters))
    assert said in str(caught.value)


def test_entry_points_are_loaded_by_name_and_only_when_asked_for(adapters, monkeypatch):
    register(monkeypatch, ("good", "mine", f"{adapters}:mine"), ("bad", "broken", f"{adapters}_broken:x"))
    assert {"mine", "broken", "torch-ddp"} <= set(registry.names())
    assert registry.load("mine").name == "mine"
    with pytest.raises(InvalidImplementation, match=r"implementation 'broken' of bad: expected .* to be importable"):
        registry.load("broken")


def test_two_distributions_with_one_name_are_both_named(adapters, monkeypatch):
    register(monkeypatch, ("one", "mine", f"{adapters}:mine"), ("two", "mine", f"{adapters}:make"))
    with pytest.raises(InvalidImplementation, match=r"expected one registration, got 2: one .*, two "):
        registry.load("mine")


def test_a_built_in_name_cannot_be_taken_over(adapters, monkeypatch):
    register(monkeypatch, ("thief", "torch-ddp", f"{adapters}:mine"))
    with pytest.raises(InvalidImplementation, match=r"fsdp-testing .*thief"):
        registry.load("torch-ddp")


def test_one_distribution_that_is_installed_twice_is_no_conflict(adapters, monkeypatch):
    register(monkeypatch, ("one", "mine", f"{adapters}:mine"), ("one", "mine", f"{adapters}:mine"))
    assert registry.load("mine").name == "mine"


def test_an_adapter_with_another_name_than_its_entry_is_refused(adapters, monkeypatch):
    register(monkeypatch, ("one", "yours", f"{adapters}:mine"))
    with pytest.raises(InvalidImplementation, match="expected an implementation named 'yours', got one named 'mine'"):
        registry.load("yours")


def test_an_adapter_travels_by_its_reference_and_is_loaded_once_in_a_process(adapters):
    adapter = registry.load(f"{adapters}:mine")
    assert adapter.reference == f"{adapters}:mine"
    arrived = pickle.loads(pickle.dumps(adapter))
    assert arrived.reference == adapter.reference
    assert registry.adapter_of(arrived.reference) is arrived
    assert registry.adapter_of(adapter) is adapter


def test_an_adapter_without_a_reference_cannot_travel():
    with pytest.raises(InvalidImplementation, match="loaded by its name or import string"):
        pickle.dumps(dataclasses.replace(registry.load("torch-ddp"), reference=""))
