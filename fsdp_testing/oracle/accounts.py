"""Takes the account of each operation while a case runs: by listening, and one observation between operations.

This needs no communication: transitions of units come through `trace_units`, collectives from the ledger, and bytes from
the adapter if it reports them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.cases.records import Case, OperationAccount, RankObservation
from fsdp_testing.cases.records.observation import GATHERS, REDUCTIONS, wire_bytes
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.ranks.ledger.recorder import Call, GroupIdentity


@dataclass(frozen=True, slots=True)
class AccountedObservation(RankObservation):
    """The report of a rank that also took the accounts of its operations."""

    accounts: tuple[OperationAccount, ...] = ()


class AccountedProgram(RankProgram):
    """A program that takes the account of each operation when it ends."""

    def __init__(self, case: Case, adapter: Adapter, rank: int) -> None:
        self._index: int | None = None
        self._reports_bytes = "gathered_bytes" not in adapter.missing
        self._model_watched: nn.Module | None = None
        self._subscription = ExitStack()
        self._open: dict[str, int] = {}
        self._last: tuple[tuple[str, int], ...] = ()
        self._gathered: list[str] = []
        self._gather_bytes: list[int] = []
        self._reduction_bytes: list[int] = []
        self._backward = False
        self.accounts: list[OperationAccount] = []
        self._one_model = case.world.of_one_model(rank)
        self._ours = False
        watched = replace(adapter, wrap=self._watched(adapter), full_parameters=self._unaccounted(adapter))
        super().__init__(case, watched, rank)

    def _unaccounted(self, adapter: Adapter) -> Callable[..., AbstractContextManager[Mapping[str, torch.Tensor]]]:
        """Return `full_parameters`; what gathers in place of an implementation without it is no communication of its own."""
        if "full_parameters" not in adapter.missing:
            return adapter.full_parameters

        @contextmanager
        def full_parameters(model: nn.Module, *, writeback: bool) -> Iterator[Mapping[str, torch.Tensor]]:
            with ExitStack() as stack:
                self._ours = True
                try:
                    full = stack.enter_context(adapter.full_parameters(model, writeback=writeback))
                finally:
                    self._ours = False
                yield full

        return full_parameters

    def _watched(self, adapter: Adapter) -> Callable[[nn.Module, Setup], nn.Module]:
        """Return a `wrap` that subscribes to the units of the model that it makes."""

        def wrap(module: nn.Module, setup: Setup) -> nn.Module:
            # A newly wrapped model replaces the earlier one, whose units no longer matter.
            self._leave()
            self._model_watched = adapter.wrap(module, setup)
            self._subscription.enter_context(adapter.trace_units(self._model_watched, self._transition))
            return self._model_watched

        return wrap

    def run(self, *, observe_all: bool = False) -> RankObservation:
        try:
            return super().run(observe_all=observe_all)
        finally:
            self._leave()

    def _leave(self) -> None:
        """End the subscription; nothing of the model is kept."""
        self._subscription.close()
        self._model_watched = None
        self._open.clear()

    def _transition(self, unit: str, transition: str, _parameters: tuple[str, ...]) -> None:
        if transition == "gather":
            self._open[unit] = 0
            self._gathered.append(unit)
        elif transition == "free":
            self._open.pop(unit, None)

    def collective(self, group: GroupIdentity, call: Call) -> None:
        """Note collectives, except those that cut modules issue among the ranks of one model."""
        if self._ours or group.members == self._one_model:
            return
        name, dtype, sizes = call.what[0], *(*call.what, None, None)[2:4]
        numel = sum(sizes) if isinstance(sizes, tuple) else int(sizes or 0)
        if name.startswith(GATHERS):
            self._gather_bytes.append(wire_bytes(str(dtype), numel))
        elif name.startswith(REDUCTIONS):
            self._reduction_bytes.append(wire_bytes(str(dtype), numel))

    @property
    def index(self) -> int:
        return -1 if self._index is None else self._index

    @index.setter
    def index(self, index: int) -> None:
        # The last operation ends where the next one begins: its account must hold nothing of the next one.
        if self._index is not None:
            self._ended(self._index)
        self._index = index

    def _ended(self, index: int) -> None:
        """Close the account of operation `index`; an operation with nothing to note has none."""
        unsharded = self._unsharded()
        if self._gather_bytes or self._reduction_bytes or self._gathered or self._backward or unsharded != self._last:
            self.accounts.append(
                OperationAccount(
                    index,
                    self._backward,
                    tuple(self._gathered),
                    unsharded,
                    tuple(self._gather_bytes),
                    tuple(self._reduction_bytes),
                )
            )
            self._gathered, self._gather_bytes, self._reduction_bytes = [], [], []
            self._backward = False
        self._last = unsharded

    def _unsharded(self) -> tuple[tuple[str, int], ...]:
        if self._model_watched is None:
            return ()
        # Reported memory decides; without it the transitions of the units.
        held_bytes = self.adapter.gathered_bytes(self._model_watched) if self._reports_bytes else self._open
        return tuple(sorted(held_bytes.items())) if held_bytes else ()

    def backward(self, loss: torch.Tensor) -> None:
        """Note whether a backward follows the operation's latest forward: without one, the units that it gathered may stay."""
        self._backward = loss.requires_grad
        super().backward(loss)


def program_for(case: Case, adapter: Adapter, rank: int) -> RankProgram:
    """Return a program that takes accounts, if the implementation traces its units and is observed without collectives."""
    traced = "unit_trace" in adapter.capabilities and adapter.observes_locally
    return (AccountedProgram if traced else RankProgram)(case, adapter, rank)
