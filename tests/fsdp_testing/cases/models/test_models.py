"""Zoo models: every number is a function of the arguments, each trait is really there, and all of them train."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from fsdp_testing.cases.models import MODELS, Inputs, ZooModel, tensors_in
from fsdp_testing.cases.models.inputs import Fields, Slotted
from fsdp_testing.cases.models.model import structure_of
from fsdp_testing.oracle.models import cast_floats

EVERY = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
BATCH = 3


def variants(model: ZooModel) -> list[dict[str, object]]:
    """One set of build arguments per value of each argument."""
    return [{name: value} for name, values in model.arguments.items() for value in values] or [{}]


def train(module: nn.Module, model: ZooModel, inputs: Inputs) -> torch.Tensor:
    loss = model.loss(module(*inputs.args, **inputs.kwargs))
    loss.backward()
    return loss


def flat(values: dict[str, torch.Tensor]) -> list[tuple[str, torch.dtype, list[float]]]:
    return [(name, v.dtype, v.reshape(-1).double().tolist()) for name, v in values.items()]


@EVERY
def test_equal_arguments_give_equal_models_and_leave_the_global_random_state(model: ZooModel):
    for arguments in variants(model):
        before = torch.get_rng_state()
        first = model.build(7, torch.float64, **arguments)
        torch.rand(5)  # another history of the global state must not matter
        second = model.build(7, torch.float64, **arguments)
        torch.set_rng_state(before)
        model.build(7, torch.float64, **arguments)
        assert torch.equal(torch.get_rng_state(), before)
        assert flat(dict(first.named_parameters())) == flat(dict(second.named_parameters()))
        assert flat(dict(first.named_buffers())) == flat(dict(second.named_buffers()))


@EVERY
def test_another_seed_gives_other_values_in_every_parameter(model: ZooModel):
    first, second = dict(model.build(1).named_parameters()), dict(model.build(2).named_parameters())
    assert [name for name in first if first[name].numel() and torch.equal(first[name], second[name])] == []


@EVERY
def test_inputs_differ_by_rank_step_and_seed_and_repeat_exactly(model: ZooModel):
    def key(*where: int) -> list[list[float]]:
        inputs = model.make_input(*where, BATCH, torch.float64)
        found = [v for v in (*inputs.args, *inputs.kwargs.values()) if isinstance(v, torch.Tensor)]
        nested = found or tensors_in(dict(inputs.kwargs))
        return [t.reshape(-1).double().tolist() for t in nested]

    keys = [key(seed, rank, step) for seed in (0, 1) for rank in (0, 1, 2) for step in (0, 1, 2)]
    assert all(a != b for i, a in enumerate(keys) for b in keys[:i])
    assert key(1, 2, 2) == keys[-1]


@EVERY
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_training_step_gives_finite_gradients_of_the_right_dtype(model: ZooModel, dtype: torch.dtype):
    for arguments in variants(model):
        module = model.build(0, dtype, **arguments)
        loss = train(module, model, model.make_input(0, 0, 0, BATCH, dtype))
        assert torch.isfinite(loss)
        grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        assert all(torch.isfinite(g).all() for g in grads.values())
        assert any(g.abs().sum() > 0 for g in grads.values())
        if "mixed_dtypes" not in model.traits:
            assert {g.dtype for g in grads.values()} == {dtype}


@EVERY
def test_an_empty_batch_gives_loss_zero_and_zero_or_no_gradients(model: ZooModel):
    for arguments in variants(model):
        module = model.build(0, torch.float64, **arguments)
        loss = train(module, model, model.make_input(0, 0, 0, 0, torch.float64))
        assert loss.item() == 0.0
        assert all(p.grad is None or p.grad.abs().sum() == 0 for p in module.parameters())


@EVERY
def test_units_exist_and_outer_units_come_before_inner_ones(model: ZooModel):
    modules = dict(model.build(0).named_modules(remove_duplicate=False))
    assert all(unit in modules for unit in model.units)
    for i, outer in enumerate(model.units):
        assert not any(outer.startswith(inner + ".") for inner in model.units[i + 1 :])


@EVERY
def test_only_models_with_the_trait_leave_trainable_parameters_without_gradient(model: ZooModel):
    module = model.build(0)
    train(module, model, model.make_input(0, 0, 0, BATCH, torch.float64))
    without = [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]
    bypassed = {"bypass"} & model.traits  # the dropped output's layer gets none, which is the point
    assert bool(without) == bool({"unused"} & model.traits or bypassed)


def with_trait(trait: str) -> list[ZooModel]:
    return [model for model in MODELS.values() if trait in model.traits]


def test_traits_are_there():
    def has(name: str, predicate) -> bool:
        return any(predicate(p) for p in MODELS[name].build(0).parameters())

    assert has("scalars", lambda p: p.ndim == 0)
    assert has("one_element", lambda p: p.shape == (1,))
    assert has("empty_parameters", lambda p: p.numel() == 0)
    assert has("strided", lambda p: not p.is_contiguous())
    assert has("frozen_bias", lambda p: not p.requires_grad)
    assert len({p.dtype for p in MODELS["two_dtypes"].build(0).parameters()}) == 2
    assert MODELS["bare_root"].build(0)._parameters == {}
    for model in with_trait("tied"):
        module = model.build(0)
        assert len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.named_parameters()))
    for model in with_trait("uneven"):
        assert any(p.ndim and p.shape[0] % 2 for p in model.build(0).parameters())
    dtypes = {b.dtype for b in MODELS["buffers"].build(0).buffers()}
    assert dtypes == {torch.float64, torch.int64, torch.bool}


def test_conditional_models_use_what_the_input_says():
    model = MODELS["conditional"]
    for use in model.input_options["use"]:
        module = model.build(0)
        train(module, model, model.make_input(0, 0, 0, BATCH, torch.float64, use=use))
        used = [module.get_parameter(f"branches.{i}.weight").grad is not None for i in range(3)]
        assert tuple(used) == use
        assert module.get_parameter("never.weight").grad is None


def test_every_parameter_of_the_mixture_gets_a_gradient_over_a_few_batches():
    model, module = MODELS["moe"], MODELS["moe"].build(0)
    for step in range(3):
        train(module, model, model.make_input(0, 0, step, 4, torch.float64))
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


def test_gradients_are_right_by_finite_differences():
    model = MODELS["moe"]
    module = model.build(0)
    inputs = model.make_input(0, 0, 0, 2, torch.float64)
    train(module, model, inputs)
    for name in ("layers.0.gate.weight", "layers.1.experts.2.up.weight", "embed.weight"):
        parameter = module.get_parameter(name)
        assert parameter.grad is not None
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        with torch.no_grad():
            losses = []
            for sign in (1, -1):
                parameter.add_(direction, alpha=sign * 1e-6)
                losses.append(model.loss(module(*inputs.args)))
                parameter.sub_(direction, alpha=sign * 1e-6)
        assert (losses[0] - losses[1]).item() / 2e-6 == pytest.approx(
            (parameter.grad * direction).sum().item(), rel=1e-6
        )


def test_the_zoo_does_not_know_that_sharding_exists():
    loaded = (
        "import sys, fsdp_testing.cases.models\n"
        "bad = [m for m in sys.modules if m.startswith(('fsdp_ref', 'fsdp_testing.'))"
        " and not m.startswith(('fsdp_testing.cases.models', 'fsdp_testing.old_names')) and m != 'fsdp_testing.cases']\n"
        "print(bad)"
    )
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_dataclass_with_slots_has_tensors():
    output = Slotted(torch.ones(2))
    assert [tensor.tolist() for tensor in tensors_in(output)] == [[1.0, 1.0]]
    assert structure_of(output) == "Slotted(mean=tensor)"


def test_a_cast_keeps_the_items_of_a_mapping_that_are_no_fields():
    fields = Fields(torch.ones(1), torch.ones(2))
    fields["more"] = torch.ones(3)
    cast = cast_floats(fields, torch.bfloat16)
    assert {name: value.dtype for name, value in cast.items()} == dict.fromkeys(
        ("mean", "spread", "more"), torch.bfloat16
    )
    assert fields["more"].dtype == torch.float32
