"""Refuses in-place changes that autograd tracked, of trained parameters in their module's forward.

One process raises for them when they happen. Here they happen to views of a gathered buffer, which are no leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_ref.errors import ParametersChangedError
from fsdp_ref.naming import join_fqn
from fsdp_ref.runtime.guards import Guard

if TYPE_CHECKING:
    from fsdp_ref.autograd.graph_ties import PassRecord
    from fsdp_ref.runtime.unit import Unit


class TrackedEdits(Guard):
    """Looks at what forward did to the views that it computed with."""

    def unit_computed(self, unit: Unit, record: PassRecord) -> None:
        """Refuse an in-place change of a trained parameter that autograd tracked, as it does in one process.

        Raises:
            ParametersChangedError: there was one.
        """
        handle = unit.handle
        bad = [handle.fqns[index] for index in record.edited() if record.tracked_anew(index)]
        if bad:
            raise ParametersChangedError(
                f"forward of {unit!r}: a leaf Variable that requires grad is being used in an in-place operation: "
                "expected changes of parameters under torch.no_grad(), got "
                f"{', '.join(join_fqn(unit.name, fqn) for fqn in bad)}. Edit the parameter under torch.no_grad(), or "
                "compute a new tensor from it."
            )
