"""What one pass over the parameters of a drawn model takes at most, from the case alone, before anything runs."""

from __future__ import annotations

import math

from fsdp_testing.cases.drawing.normal_form import plans_of
from fsdp_testing.cases.models.tree_schema import ParameterSpec, every, parameters, walk
from fsdp_testing.cases.records import Case
from fsdp_testing.judging.checkers.overruns import CommunicationBudget
from fsdp_testing.oracle.models import most_uses

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_ALIGNMENT_BYTES = 16


def budget_of(case: Case) -> CommunicationBudget | None:
    """Return the most that one pass takes; None where nobody can say: models of the zoo, and recomputed activations."""
    if case.model.tree is None or case.wrapping.checkpointed:
        return None
    specs = {spec.tie or spec.fqn: spec for spec in parameters(case.model.tree)}
    shards = case.world.mesh_shape[-1]
    cast = [dtype for o in case.program if (dtype := o.new_dtype())]
    wide = max((case.model.dtype, *cast), key=lambda name: _BYTES[name])
    units = _units(case, len(specs))
    # Aligned in the dtype of the computation, and gathered in that of storage where numbers are edited or saved.
    computed = (case.mixed_precision.param_dtype if case.mixed_precision else None) or case.model.dtype
    aligned = _ALIGNMENT_BYTES // min(_BYTES[computed], _BYTES[case.model.dtype])
    padded = sum(_padded(spec, shards, wide, aligned) for spec in specs.values())
    dtypes = {spec.dtype or case.model.dtype for spec in specs.values()}
    # A forward whose outputs cannot be examined passes for one without a graph, and frees what it gathered.
    hides = "opaque" in (case.model.tree.get("output"), *(p.node.get("returns") for p in every(walk(case.model.tree))))
    # With a mesh of two axes gradients are reduced over one and then over the other.
    return CommunicationBudget(
        uses=most_uses(case) * (2 if hides else 1),
        padded_bytes=padded + units * shards * aligned * _BYTES[wide],
        reductions=units * len(dtypes) * len(case.world.mesh_shape),
    )


def _units(case: Case, most: int) -> int:
    """Return how many units there may be: by a policy, one for each parameter."""
    if case.wrapping.policy is not None:
        return most + 1
    return 1 + max(len(units) for units in plans_of(case))


def _padded(spec: ParameterSpec, shards: int, dtype: str, aligned: int) -> int:
    """Return the bytes of one parameter, padded on its first dimension or with up to `aligned` elements, whichever is more."""
    rows, *rest = spec.shape or (1,)
    row = math.prod(rest)
    size = max(_BYTES[spec.dtype or dtype], _BYTES[dtype])
    return max(-(-rows // shards) * shards * row, rows * row + aligned) * size
