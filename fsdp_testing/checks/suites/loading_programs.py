"""Runs that look at what loading does besides the values of parameters: versions, extra state, modes, DTensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_testing.cases.models.plain import Scaled
from fsdp_testing.checks.suites.programs import review_remarks
from fsdp_testing.checks.suites.state_programs import RemarkingProgram, same_values
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.oracle import models, rank_jobs
from fsdp_testing.ranks.pool.world import current_world


class InDTensors(RemarkingProgram):
    """Loads the full state as another library may give it: each value a DTensor over all ranks."""

    def statements(self) -> Iterator[str]:
        """Yield the values that differ; nothing if the state is refused."""
        adapter = self.adapter
        with self._inside():
            whole = {fqn: value.detach().clone() for fqn, value in adapter.full_state_dict(self.model).items()}
            adapter.finish(self.model)
            self.rebuild({})
            mesh = current_world().mesh
            state: Any = {fqn: distribute_tensor(value, mesh, [Shard(0)]) for fqn, value in whole.items()}
            try:
                adapter.load_full_state_dict(self.model, state)
            except Exception:  # noqa: BLE001 - whatever it raises, it refuses
                return
            after = adapter.full_state_dict(self.model)
        for fqn, value in whole.items():
            if not same_values(after.get(fqn), value):
                yield f"{fqn} has other values than the DTensor that was loaded, and nothing was refused"


class KeepsVersions(RemarkingProgram):
    """Exchanges whole states with plain models whose modules convert what an older version of theirs saved."""

    def statements(self) -> Iterator[str]:
        """Yield the values that were converted although they are new, or not although they are old."""
        adapter, plain, other = self.adapter, self.plain_part(""), models.build_model(replace(self.case, seed=99))
        with self._inside():
            saved = adapter.full_state_dict(self.model)
        own = {fqn: value.detach().cpu().clone() for fqn, value in saved.items()}
        plain.load_state_dict(saved)
        yield from self._odd(plain.state_dict(), own, "a plain model loads from the saved state")
        other.load_state_dict(own)  # whose versions are unknown, hence old
        converted = {fqn: value.clone() for fqn, value in other.state_dict().items()}
        for what, state, due in (
            ("the model loads from a plain model's state", plain.state_dict(), dict(plain.state_dict())),
            ("the model loads from the state of an older version", dict(own), converted),
        ):
            with self._inside():
                adapter.load_full_state_dict(self.model, state)
                loaded = {fqn: value.detach().cpu() for fqn, value in adapter.full_state_dict(self.model).items()}
            yield from self._odd(loaded, due, what)

    @staticmethod
    def _odd(got: Mapping[str, Any], due: Mapping[str, Any], what: str) -> Iterator[str]:
        for fqn, value in due.items():
            if not same_values(got.get(fqn), value):
                factor = next((f for f in (2.0, 0.5) if fqn in got and same_values(got[fqn], value * f)), None)
                yield f"{fqn} has other values once {what}" + (
                    f": they are {factor:g} times as large" if factor else ""
                )


class KeepsExtraState(RemarkingProgram):
    """Changes what layers keep outside of parameters and buffers, and loads its whole state into fresh and plain models."""

    def statements(self) -> Iterator[str]:
        """Yield the models whose layers have other factors."""
        adapter, due = self.adapter, [2.0 + number for number, _ in enumerate(_scaled(self.model))]
        for layer, factor in zip(_scaled(self.model), due):
            layer.factor = factor
        with self._inside():
            saved = adapter.full_state_dict(self.model)
            adapter.finish(self.model)
            self.rebuild({})
            adapter.load_full_state_dict(self.model, saved)
        plain = self.plain_part("")
        plain.load_state_dict(saved)
        for what, model in (("a fresh model", self.model), ("a plain model", plain)):
            got = [layer.factor for layer in _scaled(model)]
            if got != due:
                yield f"{what} that loads it has layers with extra state {got}, expected {due}"


def _scaled(model: nn.Module) -> list[Scaled]:
    return [module for module in model.modules() if isinstance(module, Scaled)]


class KeepsModes(RemarkingProgram):
    """Saves and loads a model of which every second module evaluates."""

    form = "full"

    def statements(self) -> Iterator[str]:
        """Yield the modules whose mode changed."""
        modules = dict(self.model.named_modules())
        save, load = (getattr(self.adapter, f"{verb}{self.form}_state_dict") for verb in ("", "load_"))
        for number, module in enumerate(modules.values()):
            module.training = number % 2 == 0
        modes = {name: module.training for name, module in modules.items()}
        with self._inside():
            saved = save(self.model)
            after_saving = {name: module.training for name, module in modules.items()}
            load(self.model, dict(saved))
        after_loading = {name: module.training for name, module in modules.items()}
        for what, after in (("saving", after_saving), ("loading", after_loading)):
            changed = [name or "the root" for name, mode in modes.items() if after[name] != mode]
            if changed:
                yield f"{what} changed whether modules train or evaluate: {', '.join(changed)}"


def keeps_modes(form: str) -> RunMode:
    """Return the mode for a case whose model is saved and loaded in a form while some of its modules evaluate."""
    return RunMode(rank_jobs.run_as, (KeepsModes, {"form": form}), review=review_remarks)


IN_DTENSORS = RunMode(rank_jobs.run_as, (InDTensors, {}), review=review_remarks)
KEEPS_VERSIONS = RunMode(rank_jobs.run_as, (KeepsVersions, {}), review=review_remarks)
KEEPS_EXTRA_STATE = RunMode(rank_jobs.run_as, (KeepsExtraState, {}), review=review_remarks)
