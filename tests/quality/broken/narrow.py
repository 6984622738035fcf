"""Adapters that claim less than they could: one is right all the same, one silently wrong, one says so."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from faults_schedules import SecondBackwardStaysLocal
from faults_user_code import StepsUnnoticed
from toy import Toy, ToyAdapter

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter, TorchStyle

CAPABILITY = "several_forwards"


class Narrow(ToyAdapter):
    """Does not claim that several forwards may come before their backwards."""

    def __init__(self, toy: type[Toy], name: str, without: str = CAPABILITY) -> None:
        super().__init__(toy, name)
        self.capabilities -= {without}


class OneForwardOnly(Toy):
    """Refuses a second forward before the first one's backward."""

    open_forwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.open_forwards += 1
        if self.open_forwards > 1:
            raise RuntimeError("one forward at a time")
        return super().forward(*args, **kwargs)

    def finish_backward(self) -> None:
        super().finish_backward()
        self.open_forwards = 0


RIGHT = Narrow(Toy, "RIGHT")
SILENT = Narrow(SecondBackwardStaysLocal.toy, "SILENT")
REFUSING = Narrow(OneForwardOnly, "REFUSING")
OUTDATED = Narrow(StepsUnnoticed.toy, "OUTDATED", "outdated_backward")

_REFERENCE = registry.load("fsdp_ref-composable")
#: Shows parameters by gathering them, and no gradients.
GATHERED = Adapter.of(
    TorchStyle(
        **{each.name: getattr(_REFERENCE, each.name) for each in fields(TorchStyle) if each.name != "local_pieces"}
    )
)
