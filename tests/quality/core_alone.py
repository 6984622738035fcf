"""The reference without its fence: importing this module takes the guards away in the process that imports it."""

from __future__ import annotations

import fsdp_ref.api  # noqa: F401 - it puts the guards up
from fsdp_ref import fence
from fsdp_testing.adapters.ref.adapters import COMPOSABLE, WRAPPER

fence.remove()

__all__ = ["COMPOSABLE", "WRAPPER"]
