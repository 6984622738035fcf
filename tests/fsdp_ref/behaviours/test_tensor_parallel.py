"""Units over one axis of a mesh, torch's tensor parallelism over the other: as one process trains, at 2x2 ranks.

Each test does much in one world, since most of its time goes into importing torch's modules on four ranks.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp_ref.errors import FlattenError, FsdpValueError, UnshardConflictError, UnsupportedError, WritebackError
from fsdp_ref.storage.extension import ParameterExtension
from fsdp_ref.wrap import ModuleWrapPolicy

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
S = ShardingStrategy
FSDP2_ADDS_IN_REDUCE_DTYPE = torch.__version__.split(".")[:2] == ["2", "15"]
"""Over the tensor-parallel axis; up to 2.14, as DTensor and we do, in the dtype of computation."""
quiet = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")


class Block(nn.Module):
    """A norm between sequences and two layers, whose sizes no number of shards divides."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A tied embedding whose parts are uneven, blocks, and a plain parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(Block(4, 6) for _ in range(2))
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return Net().to(dtype)


@pytest.fixture
def mesh(world, request):
    """Two replicas by two parts; with three axes (replicate, dp, tp)."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = getattr(request, "param", (2, 2))
    made = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "dp", "tp")[-len(shape) :])
    yield made
    for group in made.get_all_groups():
        dist.destroy_process_group(group)


def parallelize(model, mesh):
    """The first block cut by columns and rows around a plain norm, the second along the sequence too; the tie restored."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    tp.parallelize_module(model.blocks[0], mesh["tp"], {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()})
    tp.parallelize_module(
        model,
        mesh["tp"],
        {
            "tokens": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "blocks.1": tp.PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
            ),
            "blocks.1.norm": tp.SequenceParallel(),
            "blocks.1.up": tp.ColwiseParallel(input_layouts=Shard(1)),
            "blocks.1.down": tp.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            "head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    model.head.weight = model.tokens.weight
    return model


def shard(model, mesh, path="wrapper", strategy=S.FULL_SHARD, **options):
    policy, over = ModuleWrapPolicy({Block}), mesh["dp"] if mesh.ndim == 2 else mesh["replicate", "dp"]
    if path == "composable":
        return fsdp_ref.fully_shard(model, policy=policy, strategy=strategy, device_mesh=over, **options)
    options.setdefault("use_orig_params", path == "wrapper")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, sharding_strategy=strategy, device_mesh=over, **options
    )


def ids_of(step, rank):
    return torch.randint(9, (3, 4), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model, ids):
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten().roll(1))


def micro_batches(model, losses, synced=None):
    """One backward for each; ``synced``: those before the last inside ``no_sync``."""
    *early, last = losses
    for loss in early:
        if synced is None:
            loss().backward()
        else:
            with fsdp_ref.no_sync(model):
                loss().backward()
    last().backward()


SCHEDULE = [((0,), False, 2.0), ((1, 2), False, math.inf), ((3, 4), True, None)]
"""Per step the micro-batches, whether under ``no_sync``, and by which norm gradients are clipped."""


def train(model, place, schedule=SCHEDULE):
    """Train; return the optimizer and the norms."""
    optim = torch.optim.Adam(model.parameters(), lr=0.05)
    norms = []
    for batches, no_sync, norm_type in schedule:
        micro_batches(model, [lambda b=b: loss_of(model, ids_of(b, place)) for b in batches], no_sync or None)
        if norm_type is not None:
            norms.append(fsdp_ref.clip_grad_norm_(model, 0.3, norm_type))
        optim.step()
        optim.zero_grad()
    return optim, norms


def train_in_one_process(model, schedule=SCHEDULE, replicas=2):
    optim = torch.optim.Adam(model.parameters(), lr=0.05)
    norms = []
    for batches, _, norm_type in schedule:
        (sum(loss_of(model, ids_of(b, rank)) for b in batches for rank in range(replicas)) / replicas).backward()
        if norm_type is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3, norm_type))
        optim.step()
        optim.zero_grad()
    return optim, norms


def same(got, want, where, **bounds):
    assert list(got) == list(want), where
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, **(bounds or CLOSE), msg=lambda m, n=name: f"{where} {n}: {m}")


def frozen(model):
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[1].norm.bias.requires_grad_(False)
    return model


@quiet
@pytest.mark.filterwarnings("ignore:.*has both parameters with requires_grad=True and False:UserWarning")
@pytest.mark.world(4, timeout=300)
@pytest.mark.covers("B154")
@pytest.mark.parametrize(
    ("path", "strategy", "mesh"),
    [
        ("wrapper", S.FULL_SHARD, (2, 2)),
        ("flat", S.SHARD_GRAD_OP, (2, 2)),
        ("composable", S.HYBRID_SHARD, (2, 1, 2)),
        ("composable", S.NO_SHARD, (2, 2)),
    ],
    indirect=["mesh"],
)
def test_trains_as_one_process(world, mesh, path, strategy):
    """Forward, backward, accumulation, norms, Adam; tied, replicated and (with originals) frozen parameters; uneven parts."""
    freeze = frozen if path != "flat" else (lambda model: model)
    reference = freeze(make())
    _, want = train_in_one_process(reference)
    model, place = freeze(parallelize(make(), mesh)), mesh.get_local_rank(0)
    # Rank 0's values count: other replicas differ in everything, other ranks of the axis in what is plain.
    for param in model.parameters():
        if place or (not hasattr(param, "placements") and world.rank):
            param.data.add_(1.0 + world.rank)
    model = shard(model, mesh, path, strategy, sync_module_states=True)
    _, norms = train(model, place)
    for norm, expected in zip(norms, want, strict=True):
        # Sums over other ranks than one process has: 1e-10 is far above their roundings and below any other meaning.
        torch.testing.assert_close(norm, expected, **CLOSE)
        world.assert_equal_across_ranks(norm)
    same(model.state_dict(), reference.state_dict(), "weights")


def in_bfloat16(mesh, ours, steps):
    """Return a model after so many steps of SGD; without ``steps``, one over a batch that both replicas have."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    model = parallelize(make(dtype=torch.float32), mesh)
    if ours:
        shard(model, mesh, "composable", mixed_precision=MixedPrecision(**dtypes))
    else:
        for module in (*model.blocks, model):
            torch_fully_shard(module, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(**dtypes))
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps or 1):
        loss_of(model, ids_of(step, mesh["dp"].get_local_rank() if steps else 0)).backward()
        optim.step()
        if step + 1 < steps:
            optim.zero_grad()
    return model


def whole(values):
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in values.items()}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.world(4, timeout=300)
def test_low_precision_gives_the_bits_of_torch_fsdp2(mesh):
    """bfloat16 forward, float32 reduction: both sum two addends over each axis, whose order does not matter."""
    untrained = make(dtype=torch.float32).state_dict()
    if FSDP2_ADDS_IN_REDUCE_DTYPE:
        # Of a gradient that both replicas have, ours is theirs, rounded: a norm's between activations that are cut.
        theirs = in_bfloat16(mesh, ours=False, steps=0)
        grads = whole({name: param.grad for name, param in theirs.named_parameters()})
        want = whole(theirs.state_dict())
        exact = dict(want)
        for name in ("blocks.1.norm.weight", "blocks.1.norm.bias"):
            want[name] = untrained[name] - 0.5 * grads[name].bfloat16().float()
            assert not torch.equal(want[name], exact[name]), "torch adds as before: what is said of it is wrong"
        same(in_bfloat16(mesh, ours=True, steps=0).state_dict(), want, "weights", rtol=0, atol=0)
        return
    want = whole(in_bfloat16(mesh, ours=False, steps=3).state_dict())
    same(in_bfloat16(mesh, ours=True, steps=3).state_dict(), want, "weights", rtol=0, atol=0)
    assert all(not torch.equal(value, untrained[name]) for name, value in want.items())


@pytest.mark.world(4, timeout=300)
def test_full_parameters_are_dtensors_whose_edits_stay(mesh):
    """Made in place, or by another parameter; what does not fit is refused and nothing changes."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    for path in ("wrapper", "flat"):
        model, want = shard(parallelize(make(), mesh), mesh, path), make().state_dict()
        with FullyShardedDataParallel.summon_full_params(model):
            up, down = model.blocks[0].up, model.blocks[0].down
            assert isinstance(up.weight, DTensor)
            assert up.weight.shape == (6, 4)
            with torch.no_grad():
                up.weight.mul_(2.0)
            down.weight = nn.Parameter(distribute_tensor(torch.ones(4, 6, dtype=torch.float64), mesh["tp"], [Shard(1)]))
            down.bias = nn.Parameter(distribute_tensor(torch.zeros(4, dtype=torch.float64), mesh["tp"], [Replicate()]))
        want["blocks.0.up.weight"] *= 2.0
        want["blocks.0.down.weight"], want["blocks.0.down.bias"] = torch.ones(4, 6).double(), torch.zeros(4).double()
        same(model.state_dict(), want, path)
        refused = pytest.raises(WritebackError, match="expected a DTensor of shape")
        with refused, FullyShardedDataParallel.summon_full_params(model):
            model.blocks[0].up.weight = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
        same(model.state_dict(), want, path)
        with FullyShardedDataParallel.summon_full_params(model), pytest.raises(UnshardConflictError):
            model.state_dict()
        with pytest.raises(UnsupportedError), FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            pass
        assert dict(copy.deepcopy(model).named_parameters()).keys() == dict(model.named_parameters()).keys()
        same(copy.deepcopy(model).state_dict(), want, path)


class Curves(nn.Module):
    """Operations on DTensors that save their own output, between layers that hand on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.recomputes = False

    def forward(self, x):
        return checkpoint(self.curve, x, use_reentrant=False) if self.recomputes else self.curve(x)

    def curve(self, x):
        return self.down(torch.tanh(self.up(x)).sigmoid())


def curves(mesh):
    from torch.distributed.tensor import parallel as tp

    torch.manual_seed(0)
    model = nn.Sequential(Curves(), Curves(), Curves()).double()
    model[2].recomputes = True
    reference = copy.deepcopy(model)
    for part in model:
        plan = {"up": tp.ColwiseParallel(use_local_output=False), "down": tp.RowwiseParallel()}
        tp.parallelize_module(part, mesh["tp"], plan)
    sharded = fsdp_ref.fully_shard(model, policy=ModuleWrapPolicy({Curves}), device_mesh=mesh["dp"])
    return sharded, reference


@pytest.mark.world(4, timeout=300)
def test_backward_may_begin_anywhere_and_graphs_are_freed(mesh):
    """What autograd saves of a DTensor parameter is gathered again when backward asks for it, also twice, also from inside."""
    model, reference = curves(mesh)
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    inner: list[torch.Tensor] = []
    for each in (model, reference):
        handle = each[1].down.register_forward_pre_hook(lambda module, args: inner.append(args[0]))
        out = each(x)
        handle.remove()
        inside = inner.pop()
        out.square().sum().backward(retain_graph=True)
        (inside.full_tensor() if each is model else inside).sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    same(model.state_dict(), reference.state_dict(), "weights")
    model[1].down.register_forward_pre_hook(lambda module, args: inner.append(args[0]))
    model(x)
    saved_by_its_own_node = weakref.ref(inner.pop())
    gc.collect()
    assert saved_by_its_own_node() is None, "a graph that no backward went through was never freed"


@pytest.mark.world(4, timeout=300)
def test_refused_before_anything_is_touched(mesh):
    """Each message names the parameters; the corrected call works on the same module."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, distribute_tensor

    model = parallelize(make(), mesh)
    before = {name: id(param) for name, param in model.named_parameters()}

    def put(param):
        model.blocks[0].up.weight = param

    weight = model.blocks[0].up.weight
    local = weight.to_local().detach()
    partial = nn.Parameter(DTensor.from_local(local, mesh["tp"], [Partial()]))
    both = nn.Parameter(distribute_tensor(weight.full_tensor().detach(), mesh))
    other = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    everywhere = nn.Parameter(distribute_tensor(weight.full_tensor().detach(), other))
    meta = nn.Parameter(DTensor.from_local(local.to("meta"), mesh["tp"]))
    hooked = nn.Parameter(distribute_tensor(weight.full_tensor().detach(), mesh["tp"]))
    hooked.register_hook(lambda grad: grad)
    cases = [
        (hooked, mesh["dp"], r"blocks\.0\.up\.weight with hooks"),
        (partial, mesh["dp"], r"blocks\.0\.up\.weight laid out as Partial"),
        (both, mesh["dp"], "a mesh of 2 axes"),
        (everywhere, mesh["dp"], r"sharded or replicated over \[\d\] too"),
        (meta, mesh["dp"], "on meta, expected values on cpu"),
        (weight, None, r"head\.weight|tokens\.weight.* too, expected device_mesh"),
    ]
    for param, over, message in cases:
        put(param)
        for made in (
            lambda m=over: fsdp_ref.fully_shard(model, device_mesh=m, param_init_fn=lambda module: None),
            lambda m=over: FullyShardedDataParallel(model, device_mesh=m, param_init_fn=lambda module: None),
        ):
            with pytest.raises(FlattenError, match=message):
                made()
        assert model.blocks[0].up.weight is param
    put(weight)
    assert {name: id(param) for name, param in model.named_parameters()} == before
    with pytest.raises(UnsupportedError, match="replicate"):
        fsdp_ref.composable.replicate(model, process_group=mesh["dp"].get_group())
    ignoring = parallelize(make(), mesh)
    shard(ignoring, mesh, "composable", ignored_modules=[ignoring.blocks[1]])
    with pytest.raises(UnsupportedError, match="ignore"):
        fsdp_ref.clip_grad_norm_(ignoring, 1.0)
    reference = make()
    train_in_one_process(reference)
    train(shard(model, mesh), mesh["dp"].get_local_rank())
    same(model.state_dict(), reference.state_dict(), "the corrected call")


@pytest.mark.world(4, timeout=300)
def test_two_axes_in_one_model_are_refused(mesh):
    """In one call, or when units that were made one after the other are used as one model."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import distribute_tensor

    model = parallelize(make(), mesh)
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    model.scale = nn.Parameter(distribute_tensor(torch.ones(4).double(), DeviceMesh.from_group(alone, "cpu")))
    with pytest.raises(UnsupportedError, match="one axis for all parameters"):
        fsdp_ref.fully_shard(model, device_mesh=mesh["dp"])
    around = nn.Sequential(nn.Linear(1, 1), parallelize(make(), mesh).blocks[0])
    around[0].weight = nn.Parameter(distribute_tensor(torch.ones(1, 1), DeviceMesh.from_group(alone, "cpu")))
    for part in around:
        fsdp_ref.fully_shard(part, device_mesh=mesh["dp"])
    with pytest.raises(FsdpValueError, match=r"tensor-parallel ranks.*got Block: \[\d, \d\]"):
        fsdp_ref.clip_grad_norm_(fsdp_ref.fully_shard(around, device_mesh=mesh["dp"]), 1.0)
    dist.destroy_process_group(alone)


class Transposed(ParameterExtension):
    """Lies in the flat parameter transposed."""

    def __init__(self, param):
        self.shape = param.shape

    def flatten(self, tensor):
        return tensor.detach().t()

    def unflatten(self, view):
        return view.t()

    def gather(self, local):
        return local.t()

    def cut(self, whole):
        return whole.t()


@pytest.mark.world(2)
def test_users_add_extensions(world):
    """One that says how a marked parameter is flattened, shown, saved and loaded; taken back, it is asked no more."""
    asked = []

    def factory(param, groups):
        asked.append(groups.shard_size)
        return Transposed(param) if getattr(param, "transposed", False) else None

    def build(seed=0):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
        model[0].weight.transposed = True
        return model

    take_back = fsdp_ref.register_parameter_extension(factory)
    try:
        models = [FullyShardedDataParallel(build(seed), use_orig_params=True) for seed in (0, 1)]
    finally:
        take_back()
    reference, count = build(), len(asked)
    fsdp_ref.fully_shard(build())
    assert asked == [2] * count
    optims = [torch.optim.Adam(model.parameters(), lr=0.1) for model in (*models, reference)]
    for model, optim in ((models[0], optims[0]), (reference, optims[2])):
        model(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
        optim.step()
    spec = fsdp_ref.annotations.units_in(models[0])[0].handle.layout.params[0]
    assert (spec.fqn, spec.shape) == ("0.weight", (3, 5))
    state = fsdp_ref.optim_state_dict(models[0], optims[0])
    models[1].load_state_dict(models[0].state_dict())
    optims[1].load_state_dict(fsdp_ref.optim_state_dict_to_load(models[1], optims[1], state))
    moments = fsdp_ref.optim_state_dict(models[1], optims[1])["state"]["0.weight"]["exp_avg"]
    torch.testing.assert_close(moments, optims[2].state[reference[0].weight]["exp_avg"], **CLOSE)
    same(models[1].state_dict(), reference.state_dict(), "weights")
