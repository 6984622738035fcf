"""Optimizer state that does not fit: one error on every rank that lists all that is wrong, and nothing is loaded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_functions

import fsdp_ref
from fsdp_ref import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
    optim_state_dict,
    optim_state_dict_to_load,
    state_dict_type,
)
from fsdp_ref.errors import FsdpRuntimeError, FsdpValueError, TrainingStateError, UnsupportedError

RANK0 = (StateDictType.FULL_STATE_DICT, None, FullOptimStateDictConfig(rank0_only=True))
BIAS, WEIGHT = "1.a.bias", "1.a.weight"


def without(state, key):
    return {name: value for name, value in state.items() if name != key}


def changed(saved, name, **entries):
    state = {**saved["state"], name: {**saved["state"].get(name, {}), **entries}}
    return {**saved, "state": state}


def renamed(saved, old, new):
    state = {new if name == old else name: value for name, value in saved["state"].items()}
    groups = [{**g, "params": [new if n == old else n for n in g["params"]]} for g in saved["param_groups"]]
    return {**saved, "state": state, "param_groups": groups}


def of_sgd(saved):
    groups = [{"params": g["params"], "lr": 0.1, "momentum": 0.9, "dampening": 0} for g in saved["param_groups"]]
    return {**saved, "param_groups": groups}


# What is wrong, and what the message names, for any layout.
WRONG = [
    (lambda saved: None, "must have the keys 'state' .*got a NoneType"),
    (lambda saved: without(saved, "state"), "must have the keys 'state'.*got param_groups"),
    (lambda saved: {**saved, "param_groups": 3}, "expected param_groups to be a list of dictionaries .*, got 3"),
    (
        lambda saved: {**saved, "state": {**saved["state"], BIAS: 5}},
        "of entries for each parameter, got 1.a.bias: a int",
    ),
    (lambda saved: renamed(saved, WEIGHT, 3), r"expected names of parameters as keys, got 3\..*rekey_optim_state_dict"),
    (
        lambda saved: renamed(saved, WEIGHT, "1.a.w"),
        "1.a.w: no parameter of the model, 1.a.weight: in no parameter group",
    ),
    (
        lambda saved: changed(
            changed(saved, BIAS, exp_avg=torch.zeros(8)), WEIGHT, exp_avg_sq=torch.zeros(35), exp_avg=torch.zeros(1, 5)
        ),
        r"1.a.weight.exp_avg: shape \(1, 5\) for \(7, 5\), 1.a.weight.exp_avg_sq: shape \(35,\).*1.a.bias.exp_avg: shape",
    ),
    (of_sgd, "expected the settings of AdamW, got others: momentum, dampening and none of betas, eps"),
]
# What cannot be the state of one flat parameter.
UNLIKE = [
    (lambda saved: changed(saved, BIAS, step=torch.tensor(3.0)), r"1.a.bias.step: 3.0, 2.0 in 1.gain of the same flat"),
    (
        lambda saved: changed(saved, BIAS, exp_avg=torch.zeros(7)),
        "1.a.bias.exp_avg: dtype torch.float32, torch.float64",
    ),
    (lambda saved: changed(saved, BIAS, more=torch.zeros(7)), "1.a.bias.more: missing in 1.gain"),
    (lambda saved: changed(saved, BIAS, exp_avg=3), "1.a.bias.exp_avg: a value of another kind than in 1.gain"),
    (lambda saved: {**saved, "state": without(saved["state"], BIAS)}, "1.a.bias.step: missing, while 1.gain"),
    (
        lambda saved: {**saved, "state": {**saved["state"], BIAS: without(saved["state"][BIAS], "exp_avg")}},
        "1.a.bias.exp_avg: missing, while 1.gain",
    ),
    (
        lambda saved: {
            **saved,
            "param_groups": [
                {**saved["param_groups"][0], "params": [n for n in saved["state"] if n != BIAS]},
                {**saved["param_groups"][0], "params": [BIAS], "lr": 7.0},
            ],
        },
        "expected one group of settings .* got different settings for .*1.a.bias",
    ),
]


@pytest.mark.world(2)
@pytest.mark.covers("OSD-10", "OSD-14", "B094")
def test_what_does_not_fit_is_listed(optim_lab):
    for layout, cases in (("orig FULL_SHARD wrapped", WRONG), ("flat FULL_SHARD wrapped", WRONG + UNLIKE)):
        model, optim = optim_lab.trained(layout)
        saved = optim_state_dict(model, optim)
        before = copy.deepcopy(optim.state_dict())
        for change, message in cases:
            wrong = change(saved)
            with pytest.raises(FsdpValueError, match=message):
                optim_state_dict_to_load(model, optim, wrong, load_directly=True)
            with state_dict_type(model, *RANK0), pytest.raises(FsdpValueError, match=message):
                optim_state_dict_to_load(model, optim, wrong if optim_lab.rank == 0 else saved, load_directly=True)
        optim_lab.same(optim.state_dict(), before)
        # A parameter without any state stands beside others of SGD, which counts no steps.
    momentum, make = {"momentum_buffer": torch.ones(7, dtype=torch.float64)}, torch.optim.SGD
    optim = make(model.parameters(), lr=0.1, momentum=0.9)
    saved = optim_state_dict(model, optim)
    state = {BIAS: momentum, WEIGHT: {}}
    optim_state_dict_to_load(model, optim, {**saved, "state": state}, load_directly=True)
    again = optim_state_dict(model, optim)["state"]
    optim_lab.same(again[BIAS], momentum)
    assert not again[WEIGHT]["momentum_buffer"].any()


@pytest.mark.world(2)
@pytest.mark.covers("OSD-08")
def test_forms_that_are_not_those_of_the_settings(optim_lab):
    model, optim = optim_lab.trained("orig FULL_SHARD wrapped")
    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        pieces = optim_state_dict(model, optim)
        mine = pieces if optim_lab.rank == 0 else {**pieces, "state": dict(reversed(pieces["state"].items()))}
        with pytest.raises(
            FsdpRuntimeError, match="the same names in the same order, .*got differences between rank 0 and ranks 1"
        ):
            optim_state_dict_to_load(model, optim, mine)
        with pytest.raises(FsdpRuntimeError, match="expected all ranks to have the same names in the same order"):
            optim_state_dict_to_load(model, optim, None if optim_lab.rank else pieces)
    with pytest.raises(FsdpValueError, match=r"got 0.weight.exp_avg \(DTensor\).*Set the type under which"):
        optim_state_dict_to_load(model, optim, pieces)
    with state_dict_type(model, *RANK0):
        with pytest.raises(FsdpValueError, match=r"got 0.weight.exp_avg \(DTensor\)"):
            optim_state_dict_to_load(model, optim, pieces)
        # What does not fit the optimizer of one rank is refused by all: nobody waits for a broadcast that does not come.
        some = optim_lab.adamw(
            [p for n, p in model.named_parameters() if optim_lab.rank == 0 or not n.endswith("3.bias")]
        )
        saved = optim_state_dict(model, optim)
        for group in saved.get("param_groups", ()):
            group["params"].remove("3.bias")
        with pytest.raises(FsdpValueError, match=r"3.bias: in no parameter group of the state"):
            optim_state_dict_to_load(model, some, saved)


@pytest.mark.world(3)
@pytest.mark.covers("OSD-12")
def test_ranks_that_disagree_are_named(optim_lab):
    for layout, missing in (("flat FULL_SHARD whole", 0), ("orig FULL_SHARD whole", None)):
        model, optim = optim_lab.trained(layout)
        if optim_lab.rank == 1:
            first = next(param for param in optim.state if param.numel() > 1)
            for param in list(optim.state) if missing is None else [first]:
                del optim.state[param]
        with pytest.raises(
            FsdpRuntimeError, match="1.b.weight: state on rank 0, none on rank 1|2.a.weight: state on rank"
        ):
            optim_state_dict(model, optim)
        model, optim = optim_lab.trained(layout)
        for state in optim.state.values():
            state["step"] += optim_lab.rank
            if optim_lab.rank == 2:
                state["exp_avg"] = state["exp_avg"].float()
        with pytest.raises(
            FsdpRuntimeError, match=r"\.step: rank \d: 2.0, rank \d: .*\.exp_avg: rank \d: torch.float64, rank 2"
        ):
            optim_state_dict(model, optim)


@pytest.mark.world(2)
@pytest.mark.covers("OSD-21")
def test_moments_and_models_that_are_refused(optim_lab):
    model, optim = optim_lab.trained("orig FULL_SHARD wrapped")
    saved = optim_state_dict(model, optim)
    with fsdp_ref.unshard_params(model), pytest.raises(TrainingStateError, match="got busy units"):
        optim_state_dict(model, optim)
    failures = []
    model.module[0].register_full_backward_hook(lambda *_: failures.append(refusal(model, optim, saved)))
    model(optim_lab.inputs(0)[optim_lab.rank].requires_grad_()).sum().backward()
    assert failures == ["TrainingStateError"]
    other = torch.optim.SGD([torch.zeros(3, requires_grad=True), *model.parameters()], lr=0.1)
    with pytest.raises(FsdpValueError, match=r"number 0 of shape \(3,\) in group 0.*Pass the model that"):
        optim_state_dict(model, other)
    with pytest.raises(FsdpValueError, match="expected parameter keys of this optimizer"):
        optim_state_dict(model, optim, {"state": {}, "param_groups": [{"params": [99]}]})
    # Around units a new parameter is like any other; inside of one nobody averages its gradient.
    around = nn.Sequential(model)
    around.extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optim.add_param_group({"params": [around.extra]})
    around.extra.grad = torch.ones_like(around.extra)
    optim.step()
    assert optim_state_dict(around, optim)["state"]["extra"]["exp_avg"].shape == (2,)
    model.module[1].module.extra = around.extra
    with pytest.raises(FsdpRuntimeError, match=r"added to modules of units after sharding: 0.1.extra"):
        optim_state_dict(around, optim)
    model.module[1].module.a = nn.Identity()
    with pytest.raises(
        FsdpRuntimeError, match=r"a model without 0.1.a.weight, 0.1.a.bias, whose modules were replaced"
    ):
        optim_state_dict(around, optim)


def refusal(model, optim, saved):
    try:
        optim_state_dict_to_load(model, optim, saved)
    except TrainingStateError as error:
        return type(error).__name__
    return "loaded"


@pytest.mark.covers("OSD-19", "OSD-18")
def test_names_and_positions():
    rekey = FullyShardedDataParallel.rekey_optim_state_dict
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optim = torch.optim.Adam([{"params": [model[1].bias]}, {"params": [model[0].weight, model[0].bias], "lr": 0.5}])
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    own = optim.state_dict()
    named = rekey(own, OptimStateKeyType.PARAM_NAME, model, optim=optim)
    assert list(named["state"]) == ["1.bias", "0.weight", "0.bias"]
    assert [group["params"] for group in named["param_groups"]] == [["1.bias"], ["0.weight", "0.bias"]]
    assert named["state"]["0.weight"] is own["state"][1]
    assert rekey(named, OptimStateKeyType.PARAM_NAME, model, optim=optim) is named
    assert rekey(named, OptimStateKeyType.PARAM_ID, model, optim=optim) == own
    with pytest.warns(FutureWarning, match="`optim_input`"):
        given = [{"params": model[1].bias}, {"params": [model[0].weight, model[0].bias]}]
        assert rekey(named, OptimStateKeyType.PARAM_ID, model, given) == own
    # One group of all parameters is meant without an optimizer.
    assert list(rekey(named, OptimStateKeyType.PARAM_ID, model)["state"]) == [3, 0, 1]
    mixed = {"state": {0: {}, "1.bias": {}}, "param_groups": []}
    with pytest.raises(FsdpValueError, match="Invalid parameter keys: .*0, '1.bias'"):
        rekey(mixed, OptimStateKeyType.PARAM_ID, model)
    with pytest.raises(FsdpValueError, match="got others: 2.bias"):
        rekey({"state": {"2.bias": {}}, "param_groups": []}, OptimStateKeyType.PARAM_ID, model)
    with pytest.raises(TypeError, match="optim_state_key_type"):
        rekey(own, "PARAM_NAME", model)


@pytest.mark.parametrize(
    "layout", ["orig FULL_SHARD wrapped", "composable FULL_SHARD whole", "flat SHARD_GRAD_OP whole"]
)
@pytest.mark.world(2)
def test_torchs_own_functions_are_refused(optim_lab, layout):
    """They take pieces for whole parameters; what they may do, and what users do, is left alone."""
    model, optim = optim_lab.trained(layout)
    saved, own = optim_state_dict(model, optim), copy.deepcopy(optim.state_dict())
    fresh = optim_lab.adamw(model.parameters())
    optim.zero_grad()  # where there are gradients torch makes no step of its own, and a fresh optimizer has no state to save
    named = {"state": dict(saved["state"]), "param_groups": saved["param_groups"]}
    lenient = torch_functions.StateDictOptions(strict=False)  # no name of a whole parameter is that of a flat one
    calls = [lambda o=o: torch_functions.get_optimizer_state_dict(model, o) for o in (optim, fresh)]
    calls += [
        lambda: torch_functions.get_state_dict(model, optim),
        lambda: torch_functions.set_optimizer_state_dict(model, optim, named, options=lenient),
        lambda: torch_functions.get_optimizer_state_dict(model, loaded),
    ]
    loaded = optim_lab.adamw(model.parameters())
    optim_state_dict_to_load(model, loaded, saved, load_directly=True)
    for call in calls:
        with pytest.raises(
            UnsupportedError, match=r"this rank's pieces of parameters. Save with fsdp_ref.optim_state_dict"
        ):
            call()
    optim_lab.same(own, optim.state_dict())
    optim.load_state_dict(own)
    optim_lab.same(torch_functions.get_model_state_dict(model), model.state_dict())
    others = [torch.nn.Parameter(torch.ones(2))]
    plain = optim_lab.adamw(others)
    assert torch_functions.get_optimizer_state_dict(nn.ParameterList(others), plain)["state"]["0"]["step"] == 1.0


@pytest.mark.world(3)
def test_what_one_rank_alone_cannot_save_is_refused_by_all(optim_lab):
    model, optim = optim_lab.trained("orig FULL_SHARD wrapped")
    odd = {"state": {}, "param_groups": [{"params": [99]}]}
    with pytest.raises(FsdpValueError, match=r"expected parameter keys of this optimizer \(.*\), got 99.") as caught:
        optim_state_dict(model, optim, odd if optim_lab.rank == 1 else None)
    assert ("rank 1 of the shard group: " in str(caught.value)) == (optim_lab.rank != 1)
    stranger = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
    with pytest.raises(FsdpValueError, match=r"number 0 of shape \(3,\) in group 0"):
        optim_state_dict(model, stranger if optim_lab.rank == 2 else optim)
    assert optim_state_dict(model, optim)["state"]


@pytest.mark.world(2)
@pytest.mark.parametrize("layout", ["flat FULL_SHARD whole", "orig FULL_SHARD whole", "composable FULL_SHARD wrapped"])
@pytest.mark.parametrize("listed", [False, True])
def test_state_that_an_optimizer_keeps_for_all_its_tensors_is_no_parameters_state(optim_lab, layout, listed):
    model = optim_lab.shard(layout, optim_lab.net())
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    held = list(model.parameters())
    joined = torch.cat([param.detach().flatten() for param in held])
    # A flat parameter is all there is, so that one tensor of its size is its own.
    optim.state[held[0]]["direction"] = [joined] if listed or layout.startswith("flat") else joined
    with pytest.raises(FsdpRuntimeError, match=r"expected each rank to have equal state .*\.direction: rank"):
        optim_state_dict(model, optim)


@pytest.mark.world(3)
@pytest.mark.parametrize("settings", [RANK0, (StateDictType.SHARDED_STATE_DICT,)], ids=["rank 0's", "shards"])
def test_what_one_rank_alone_cannot_load_is_refused_by_all(optim_lab, settings):
    model, optim = optim_lab.trained("orig FULL_SHARD wrapped")
    stranger = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
    with state_dict_type(model, *settings):
        saved = optim_state_dict(model, optim)
        with pytest.raises(FsdpValueError, match=r"number 0 of shape \(3,\) in group 0"):
            optim_state_dict_to_load(model, stranger if optim_lab.rank == 2 else optim, saved)
        assert optim_state_dict_to_load(model, optim, saved)["state"]
