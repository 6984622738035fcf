"""Faults in saving and loading models and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from fault import fault
from toy_more import MoreToy


@fault("full_state_dict.fresh_instance")
class SavesOwnSpan(MoreToy):
    """A rank saves zeros for the spans of the other ranks."""

    def saved(self) -> dict[str, torch.Tensor]:
        state = super().saved()
        for fqn in self.full:
            start, stop = self.span(self.full[fqn].numel())
            mine = torch.zeros(self.full[fqn].numel(), dtype=state[fqn].dtype)
            mine[start:stop] = state[fqn].reshape(-1)[start:stop]
            state[fqn] = mine.reshape(self.shapes[fqn])
        return state


@fault("full_state_dict.fresh_instance")
class LoadsOnFirstRank(MoreToy):
    """Only rank 0 loads."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        if self.rank == 0:
            super().load(state)


@fault("full_state_dict.before_training")
class SavesWhatWasGathered(MoreToy):
    """Before the first forward the values of construction are saved in float32."""

    def saved(self) -> dict[str, torch.Tensor]:
        state = super().saved()
        return state if getattr(self, "ran", False) else {fqn: t.float().to(t.dtype) for fqn, t in state.items()}

    def watch(self, output: Any) -> None:
        self.ran = True
        super().watch(output)


@fault("full_state_dict.buffers")
class BuffersNotLoaded(MoreToy):
    """Buffers keep the values of construction."""

    def saved(self) -> dict[str, torch.Tensor]:
        return {fqn: tensor for fqn, tensor in super().saved().items() if fqn in self.full}


@fault("full_state_dict.buffers")
class OnlyCountersSaved(MoreToy):
    """Of buffers only those of integers are saved and loaded."""

    def saved(self) -> dict[str, torch.Tensor]:
        return {fqn: held for fqn, held in super().saved().items() if fqn in self.full or held.dtype == torch.int64}


@fault("full_state_dict.buffers")
class BuffersSavedInFloat32(MoreToy):
    """Buffers are saved in float32, and loaded from that."""

    def saved(self) -> dict[str, torch.Tensor]:
        return {fqn: held if fqn in self.full else held.float() for fqn, held in super().saved().items()}


@fault("full_state_dict.saved_again")
class SavesALeftover(MoreToy):
    """What is saved has an entry that the plain module's state does not have."""

    def saved(self) -> dict[str, torch.Tensor]:
        return super().saved() | {"_flat_param_leftover": torch.full((3,), torch.nan)}


@fault("full_state_dict.other_world_size")
class CutForSavedWorld(MoreToy):
    """What another number of ranks saved is cut as it was cut there."""

    def saved(self) -> dict[str, torch.Tensor]:
        return super().saved() | {"ranks": torch.tensor(self.size)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        size, self.size = self.size, int(state["ranks"])
        spans = {fqn: self.span(p.numel()) for fqn, p in self.full.items()}
        self.size = size
        for fqn, shard in self.shards.items():
            start, _ = spans[fqn]
            held = state[fqn].reshape(-1)[start : start + shard.numel()]
            shard.data[: held.numel()] = held


@fault("sharded_state_dict.fresh_instance")
class NextRanksShard(MoreToy):
    """A rank saves the shards of the next rank."""

    def saved_shards(self) -> dict[str, torch.Tensor]:
        found = super().saved_shards()
        for fqn in self.full:
            whole, numel = self.gather(fqn), self.full[fqn].numel()
            start = self.span(numel)[0]
            found[fqn] = whole.roll(1)[start : start + self.shards[fqn].numel()]
        return found


@fault("sharded_state_dict.before_training")
class ShardsRounded(MoreToy):
    """Shards are saved in float32."""

    def saved_shards(self) -> dict[str, torch.Tensor]:
        return {fqn: t.float().to(t.dtype) if t.is_floating_point() else t for fqn, t in super().saved_shards().items()}


@fault("sharded_state_dict.buffers")
class ShardsWithoutBuffers(MoreToy):
    """Buffers are not among the shards and are not loaded."""

    def load_shards(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_shards(dict(state) | {fqn: buffer.clone() for fqn, buffer in self.buffers_by_name().items()})


@fault("sharded_state_dict.buffers")
class OnlyCountersAmongShards(MoreToy):
    """Of buffers only those of integers are loaded with the shards."""

    def load_shards(self, state: Mapping[str, torch.Tensor]) -> None:
        own = {fqn: buffer.clone() for fqn, buffer in self.buffers_by_name().items() if buffer.dtype != torch.int64}
        super().load_shards({**state, **own})


@fault("local_state_dict.fresh_instance")
class LocalShardsSwapped(MoreToy):
    """Each raw shard is loaded in reverse."""

    def load_locally(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_locally({fqn: t.flip(0) if fqn in self.full and t.dim() else t for fqn, t in state.items()})


@fault("local_state_dict.fresh_instance")
class LocalShardIsAView(MoreToy):
    """What is saved is the live shard, which the end of the old model zeroes."""

    def saved_locally(self) -> dict[str, torch.Tensor]:
        live = {fqn: shard.detach() for fqn, shard in self.shards.items()}
        saved = live | self.buffers_by_name()
        for shard in live.values():
            shard.zero_()
        return saved


@fault("local_state_dict.fresh_instance")
class EmptyShardEndsLoading(MoreToy):
    """Loading stops at the first parameter that leaves a rank without elements (B092)."""

    def load_locally(self, state: Mapping[str, torch.Tensor]) -> None:
        small = [fqn for fqn in self.full if self.full[fqn].numel() <= self.size]
        kept = dict(self.saved_shards())
        names = list(self.full)
        stop = names.index(small[0]) if small else len(names)
        super().load_locally(
            {fqn: state[fqn] if names.index(fqn) < stop else kept[fqn] for fqn in names}
            | {fqn: state[fqn] for fqn in self.buffers_by_name()}
        )


@fault("optim_state.fresh_instance")
class StepCountLost(MoreToy):
    """Step counters begin at zero after loading."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        super().load_optimizer(optimizer, saved)
        for entries in optimizer.state.values():
            if "step" in entries:
                entries["step"] = torch.zeros_like(entries["step"])


@fault("optim_state.learning_rate")
class LearningRateLost(MoreToy):
    """Parameter groups are not restored."""

    def load_groups(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        """Nothing is taken over."""


@fault("optim_state.learning_rate")
class ZeroMeansAbsent(MoreToy):
    """A learning rate of zero is taken for a missing one."""

    def load_groups(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        given = [{key: value for key, value in group.items() if value} for group in groups]
        super().load_groups(optimizer, given)


@fault("optim_state.fresh_instance")
class MomentsSwapped(MoreToy):
    """Adam's first moment is restored from the second."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        super().load_optimizer(optimizer, saved)
        for entries in optimizer.state.values():
            if "exp_avg" in entries:
                entries["exp_avg"] = entries["exp_avg_sq"].clone()


@fault("optim_state.sharded_model")
class StateOfFirstRank(MoreToy):
    """Every rank is given the optimizer state of the first rank's spans."""

    def own_state(self, fqn: str, value: Any, start: int, stop: int) -> Any:
        return super().own_state(fqn, value, 0, stop - start)


@fault("optim_state.other_world_size")
class StateNotMoved(MoreToy):
    """Optimizer state of another number of ranks is dropped."""

    def saved_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return super().saved_optimizer(optimizer) | {"ranks": self.size}

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        if saved["ranks"] == self.size:
            super().load_optimizer(optimizer, saved)


class RanksOfSaving(MoreToy):
    """Says with the optimizer how many ranks saved."""

    def saved_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return super().saved_optimizer(optimizer) | {"ranks": self.size}


@fault("optim_state.some_ranks")
class LastShardLost(MoreToy):
    """Fewer ranks load nothing of the last shard where it is uneven."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        built, ranks = super().saved(), dist.get_world_size()
        cut = dict(state)
        for fqn in self.full if self.size < ranks else ():
            chunk = -(-self.full[fqn].numel() // ranks)
            last = min((ranks - 1) * chunk, self.full[fqn].numel())
            if last + chunk > self.full[fqn].numel():
                flat = torch.cat((state[fqn].reshape(-1)[:last], built[fqn].reshape(-1)[last:]))
                cut[fqn] = flat.reshape(self.shapes[fqn])
        super().load(cut)


@fault("optim_state.some_ranks")
class MomentsByPlace(RanksOfSaving):
    """Fewer ranks load the moments of the parameters in another order: each has the next one's, as far as that goes."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        if self.size < saved["ranks"]:
            names = list(saved["state"])
            moved = dict(zip(names, (saved["state"][name] for name in (*names[1:], names[0]))))
            state = {fqn: {**entries, **self.fitting(entries, moved[fqn])} for fqn, entries in saved["state"].items()}
            saved = {**saved, "state": state}
        super().load_optimizer(optimizer, saved)

    @staticmethod
    def fitting(own: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        def resized(value: torch.Tensor, size: int) -> torch.Tensor:
            return value.repeat(size)[:size] if value.numel() else value.new_zeros(size)

        moments = (name for name in ("exp_avg", "exp_avg_sq") if name in own and name in other)
        return {name: resized(other[name], own[name].numel()) for name in moments}


@fault("optim_state.before_first_step")
class SavingSteps(MoreToy):
    """Saving makes the state exist by a step with learning rate 0, which counts as one."""

    def saved_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if not optimizer.state:
            rates = [group["lr"] for group in optimizer.param_groups]
            for shard in self.shards.values():
                shard.grad = torch.zeros_like(shard)
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            optimizer.step()
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate
            self.zero_grad()
        return super().saved_optimizer(optimizer)


@fault("optim_state.without_state")
class StatelessRefused(MoreToy):
    """An optimizer without state cannot be loaded."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        if not any(saved["state"].values()):
            raise RuntimeError("nothing to load")
        super().load_optimizer(optimizer, saved)


@fault("optim_state.repeatedly")
class AddsOnLoading(MoreToy):
    """Loaded moments are rounded to float32 each time."""

    def own_state(self, fqn: str, value: Any, start: int, stop: int) -> Any:
        own = super().own_state(fqn, value, start, stop)
        return own.float().to(own.dtype) if isinstance(own, torch.Tensor) and own.dim() else own


@fault("optim_state.frozen_parameters")
class FrozenGetsState(MoreToy):
    """Loading gives the first trainable parameter the state of the last."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        super().load_optimizer(optimizer, saved)
        frozen = [shard for shard in self.shards.values() if not shard.requires_grad]
        for entries in optimizer.state.values() if frozen else ():
            for name, value in entries.items():
                if value.dim():
                    entries[name] = value * 1.5


@fault("optim_state.frozen_parameters")
class FrozenGetsMoments(MoreToy):
    """Loading gives parameters without state, such as frozen ones, moments of their own."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        super().load_optimizer(optimizer, saved)
        for shard in self.shards.values():
            if not optimizer.state.get(shard):
                moments = {name: torch.full_like(shard, 7.0) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[shard] = {"step": torch.tensor(1.0), **moments}


@fault("optim_state.shared_parameters")
class SharedStateHalved(MoreToy):
    """The state of a parameter under two names is divided by two."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        super().load_optimizer(optimizer, saved)
        sites = [p for _, p in self.inner.named_parameters(remove_duplicate=False)]
        for fqn, shard in self.shards.items():
            if sum(p is self.full[fqn] for p in sites) > 1:
                optimizer.state[shard]["exp_avg"] /= 2


@fault("full_state_dict.saved_again")
class SecondSaveIsTheFirst(MoreToy):
    """What was saved once is given again as long as the first parameter is what it was."""

    def saved(self) -> dict[str, torch.Tensor]:
        state = super().saved()
        first = next(iter(state))
        kept: dict[str, torch.Tensor] = self.__dict__.setdefault("kept", state)
        if not torch.equal(kept[first], state[first]):
            self.__dict__["kept"] = state
        return self.__dict__["kept"]


@fault("sharded_state_dict.saved_again")
class SecondShardsAreTheFirst(MoreToy):
    """The same of a state in shards."""

    def saved_shards(self) -> dict[str, torch.Tensor]:
        state = super().saved_shards()
        first = next(iter(state))
        kept: dict[str, torch.Tensor] = self.__dict__.setdefault("kept_shards", state)
        if not torch.equal(kept[first], state[first]):
            self.__dict__["kept_shards"] = state
        return self.__dict__["kept_shards"]


# ----------------------------------------------------------------------------------------------- awaiting reduction


@fault("accumulation.saved")
class SavesAStepAhead(MoreToy):
    """Saving applies the gradients that await reduction."""

    def saved(self) -> dict[str, torch.Tensor]:
        state = super().saved()
        return {fqn: held - self.sums.get(fqn, torch.zeros(())) * 0.1 for fqn, held in state.items()}


@fault("accumulation.moved")
class MovingDropsGradients(MoreToy):
    """`module.to` drops what awaits reduction."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        self.sums = {}
        return super()._apply(fn, recurse)


@fault("accumulation.interrupted")
class NotClearedAfterException(MoreToy):
    """After a forward that raised nothing is cleared."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.raised = True
        output = super().forward(*args, **kwargs)
        self.raised = False
        return output

    def clear_sums(self, set_to_none: bool) -> None:
        if not self.raised:
            super().clear_sums(set_to_none)
