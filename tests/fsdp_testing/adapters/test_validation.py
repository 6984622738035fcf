"""An adapter's own mistakes are found before its implementation is judged, and are reported as the adapter's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fsdp_testing import run_ranks
from fsdp_testing.adapters import registry, validation
from fsdp_testing.adapters.adapter import Adapter, TorchStyle
from fsdp_testing.cases.records import Verdict
from fsdp_testing.checks.conformance import run_check
from fsdp_testing.errors import InvalidImplementation, WorldFailed
from fsdp_testing.ranks.pool.outcome import ErrorRecord, Fate, RankOutcome

PREAMBLE = """
import dataclasses
from contextlib import contextmanager
import torch
from torch import nn
from fsdp_testing.adapters.shared import naming, pieces
from fsdp_testing.adapters.adapter import TorchStyle

TAGS = {"no_shard", "buffers", "nested_wrapping"}

def style(wrap=lambda module, setup: module, tags=(), **more):
    return TorchStyle(name="broken", wrap=wrap, capabilities=frozenset(TAGS | set(tags)), **more)

def first_piece(change):
    def local_pieces(model):
        held = pieces.of_parameters(naming.named_parameters(model))
        name = next(iter(held))
        held[name] = change(held[name])
        return held
    return local_pieces
"""

#: What an author may get wrong -> a part of what is reported about it.
MISTAKES = {
    "returns_nothing": ("def wrap(m, s): pass\nIT = style(wrap)", "returned NoneType, not an nn.Module"),
    "raises": ("def wrap(m, s): raise KeyError('units')\nIT = style(wrap)", "KeyError: 'units'"),
    "raises_on_one_rank": (
        "def wrap(m, s):\n    if s.rank: raise KeyError('rank')\n    return m\nIT = style(wrap)",
        "KeyError",
    ),
    "dies_on_one_rank": (
        "import os\ndef wrap(m, s):\n    if s.rank: os._exit(3)\n    return m\nIT = style(wrap)",
        "expected an adapter that wraps two layers on every rank",
    ),
    "turns_eval_on": ("def wrap(m, s): return m.eval()\nIT = style(wrap)", "turned training mode off"),
    "changes_the_default_dtype": (
        "def wrap(m, s):\n    torch.set_default_dtype(torch.float64)\n    return m\nIT = style(wrap)",
        "changed the default dtype from torch.float32 to torch.float64",
    ),
    "wrapper_prefix_in_names": (
        "def wrap(m, s): return nn.Sequential(m)\nIT = style(wrap)",
        "local_pieces expects the names of the unwrapped module, missing ['layers.0.bias'",
    ),
    "no_parameter_for_an_optimizer": (
        "IT = style(named_parameters=lambda m: [], local_pieces=first_piece(lambda p: p))",
        "named_parameters gives no parameter",
    ),
    "forgets_a_span": (
        "IT = style(local_pieces=first_piece(lambda p: (dataclasses.replace(p[0], stop=8, value=p[0].value[:1]),)))",
        "of all ranks cover 8 of 64 elements",
    ),
    "span_without_its_elements": (
        "IT = style(local_pieces=first_piece(lambda p: (dataclasses.replace(p[0], stop=9),)))",
        "span [0, 9) comes with 64 elements",
    ),
    "span_outside": (
        "IT = style(local_pieces=first_piece(lambda p: (dataclasses.replace(p[0], start=1, stop=65),)))",
        "is outside the parameter's 64 elements",
    ),
    "overlapping_spans": ("IT = style(local_pieces=first_piece(lambda p: p + p))", "overlaps the span before it"),
    "shape_of_the_shard": (
        "IT = style(local_pieces=first_piece(lambda p: (dataclasses.replace(p[0], shape=(64,)),)))",
        "names shape (64,), the parameter has (8, 8)",
    ),
    "values_at_the_wrong_place": (
        (
            "@contextmanager\ndef full(m, *, writeback): yield {n: p.data for n, p in m.named_parameters()}\n"
            "IT = style(full_parameters=full, local_pieces=first_piece("
            "lambda p: (dataclasses.replace(p[0], value=p[0].value.flip(0)),)))"
        ),
        "local_pieces shows the values of 'layers.0.weight' at the wrong place",
    ),
    "no_sync_is_no_context": (
        "IT = style(tags=['no_sync'], no_sync=lambda m: None)",
        "`no_sync` returned something else than it promises: expected a context manager, got NoneType None",
    ),
    "claims_no_sync_without_any": ("IT = style(tags=['no_sync'])", "expected the method `no_sync`"),
    "full_parameters_are_shards": (
        (
            "@contextmanager\ndef full(m, *, writeback):\n"
            "    yield {n: p.data.reshape(-1) for n, p in m.named_parameters()}\n"
            "IT = style(tags=['summon_writeback'], full_parameters=full, local_pieces=first_piece(lambda p: p))"
        ),
        "full_parameters gives different shapes from the unwrapped module for ['layers.0.weight'",
    ),
}


#: What an implementation may do as well as its adapter: a check decides, and has a verdict.
FAULTS = {
    "changes_values": (
        "def wrap(m, s):\n    nn.init.zeros_(next(m.parameters()))\n    return m\nIT = style(wrap)",
        "construction.keeps_numbers",
        "parameter layers.0.weight is off by",
    ),
    "changes_a_buffer": (
        "def wrap(m, s):\n    for b in m.buffers(): b.zero_()\n    return m\nIT = style(wrap)",
        "construction.keeps_buffers",
        "buffer plain.mask on rank 0 is off by",
    ),
    "freezes": (
        "def wrap(m, s): return m.requires_grad_(False)\nIT = style(wrap)",
        "construction.keeps_numbers",
        "has requires_grad=False, expected True",
    ),
}


@pytest.fixture
def adapter_module(tmp_path, monkeypatch):
    def write(body: str) -> str:
        module = f"adapter_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(PREAMBLE + body)
        monkeypatch.syspath_prepend(tmp_path)
        return f"{module}:IT"

    return write


@pytest.mark.parametrize("name", registry.BUILT_IN)
@pytest.mark.parametrize("size", [2, 3])
def test_what_ships_with_us_is_fit(name, size):
    validation.validate(registry.load(name), run_ranks, world_size=size)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_as_the_adapters_own(mistake, adapter_module):
    body, said = MISTAKES[mistake]
    with pytest.raises(InvalidImplementation) as caught:
        validation.validate(registry.load(adapter_module(body)), run_ranks)
    assert said in str(caught.value)
    assert "This is the adapter's mistake" in str(caught.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_wrapping_changes_is_for_a_check_to_tell(fault, adapter_module):
    body, check, said = FAULTS[fault]
    name = adapter_module(body)
    validation.validate(registry.load(name), run_ranks)
    result = run_check(name, check)
    assert result.verdict is Verdict.FAIL
    assert said in result.explanation


def test_the_same_adapter_without_a_mistake_is_fit(adapter_module):
    body = "IT = style(tags=['summon_writeback'], local_pieces=first_piece(lambda p: p))"
    validation.validate(registry.load(adapter_module(body)), run_ranks)


def claims(*tags: str, **more) -> Adapter:
    return Adapter.of(TorchStyle(name="x", wrap=lambda m, s: m, capabilities=frozenset(tags), **more))


def test_unknown_tags_are_listed():
    with pytest.raises(
        InvalidImplementation, match=r"known tags, got 'fast', 'no_shrad' \(did you mean 'no_shard'\?\)"
    ):
        validation.check_claims(claims("no_shard", "no_shrad", "fast"))


def test_a_claim_without_its_methods_is_named_with_them():
    with pytest.raises(InvalidImplementation) as caught:
        validation.check_claims(claims("no_shard", "full_state_dict", "comm_hook", "unit_trace"))
    assert "claims 'comm_hook' without the method register_comm_hook" in str(caught.value)
    assert "claims 'unit_trace' without the method trace_units" in str(caught.value)
    assert "claims 'full_state_dict' without the methods full_state_dict, load_full_state_dict" in str(caught.value)


def test_one_strategy_must_be_claimed():
    with pytest.raises(InvalidImplementation, match="claims no strategy"):
        validation.check_claims(claims("no_sync"))


def test_a_death_leads_whatever_the_others_raised_after_it():
    raised = ErrorRecord(
        "fsdp_testing.errors.InvalidImplementation", "mlp: RuntimeError: Connection closed by peer", ""
    )
    ranks = (RankOutcome(0, Fate.RAISED, error=raised), RankOutcome(1, Fate.DIED, exit_code=3, began=True))

    def run_on_ranks(*_args, **_options):
        raise WorldFailed("rank 0: connection closed", SimpleNamespace(ranks=ranks))

    with pytest.raises(InvalidImplementation) as caught:
        validation.validate(claims("full_shard"), run_on_ranks)
    said = str(caught.value)
    assert "rank 1 died with exit code 3 in `wrap`" in said
    assert said.index("rank 1 died") < said.index("connection closed")
