"""The public entry points: thin, over one code path."""

from fsdp_ref import fence, torch_names  # noqa: F401 - torch's names appear on what is made from here on
from fsdp_ref.checkpoint import model_state
from fsdp_ref.runtime.guards import UNIT_MADE

fence.install()
UNIT_MADE[:] = [model_state.install]
