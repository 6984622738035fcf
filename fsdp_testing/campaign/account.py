"""How is the account of each operation taken while a case runs? By listening, and one observation between operations.

Nothing is asked of the ranks: transitions of units come through `trace_units`, collectives from the ledger, and bytes
from the adapter where it reports them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import nn

from fsdp_testing.implementations.adapter import Adapter
from fsdp_testing.implementations.protocol import Setup
from fsdp_testing.ledger.recorder import Call
from fsdp_testing.programs.execute import RankProgram, SetupMaker
from fsdp_testing.records import Case, OperationAccount
from fsdp_testing.records.account import GATHERS, REDUCTIONS, wire_bytes


class Accountant:
    """Takes the accounts of one case on one rank."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._reports_bytes = "gathered_bytes" not in adapter.missing
        self._model: nn.Module | None = None
        self._subscription = ExitStack()
        self._open: dict[str, int] = {}
        self._last: tuple[tuple[str, int], ...] = ()
        self._gathered: list[str] = []
        self._gather_bytes: list[int] = []
        self._reduction_bytes: list[int] = []
        self._backward = False
        self.accounts: list[OperationAccount] = []

    def watched(self) -> Adapter:
        """Return the adapter with a `wrap` that subscribes to the units of the model that it makes."""
        original: Callable[..., nn.Module] = self._adapter.wrap

        def wrap(module: nn.Module, setup: Setup) -> nn.Module:
            self.close()
            model = original(module, setup)
            self._model = model
            self._subscription.enter_context(self._adapter.trace_units(model, self._transition))
            return model

        return replace(self._adapter, wrap=wrap)

    def close(self) -> None:
        """End the subscription; nothing of the model is kept."""
        self._subscription.close()
        self._model = None
        self._open.clear()

    def _transition(self, unit: str, transition: str, _parameters: tuple[str, ...]) -> None:
        if transition == "gather":
            self._open[unit] = 0
            self._gathered.append(unit)
        elif transition == "free":
            self._open.pop(unit, None)

    def collective(self, call: Call) -> None:
        """Note what goes on the wire."""
        name = call.what[0]
        if name.startswith(GATHERS):
            self._gather_bytes.append(_size(call))
        elif name.startswith(REDUCTIONS):
            self._reduction_bytes.append(_size(call))

    def backward(self) -> None:
        """Note that a backward runs in this operation."""
        self._backward = True

    def ended(self, index: int) -> None:
        """Close the account of operation `index`; one that did nothing worth noting has none."""
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
        if self._model is None:
            return ()
        # Memory decides where it is reported; else the transitions of the units.
        found = self._adapter.gathered_bytes(self._model) if self._reports_bytes else self._open
        return tuple(sorted(found.items())) if found else ()


def _size(call: Call) -> int:
    dtype, sizes = (*call.what, None, None)[2:4]
    numel = sum(sizes) if isinstance(sizes, tuple) else int(sizes or 0)
    return wire_bytes(str(dtype), numel)


class AccountedProgram(RankProgram):
    """A program that reports to an accountant when each operation is over."""

    def __init__(self, case: Case, accountant: Accountant, rank: int, make_setup: SetupMaker) -> None:
        self._index: int | None = None
        self._accountant = accountant
        super().__init__(case, accountant.watched(), rank, make_setup)

    @property
    def index(self) -> int:
        """Return the index of the operation that runs now."""
        return -1 if self._index is None else self._index

    @index.setter
    def index(self, index: int) -> None:
        if self._index is not None:
            self._accountant.ended(self._index)
        self._index = index

    def backward(self, loss: torch.Tensor) -> None:
        if loss.requires_grad:
            self._accountant.backward()
        super().backward(loss)


def accountant_for(adapter: Adapter) -> Accountant | None:
    """Return one if the implementation traces its units and is observed without collectives; else None."""
    traced = "unit_trace" in adapter.capabilities and adapter.observes_locally
    return Accountant(adapter) if traced else None
