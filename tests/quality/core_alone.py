"""The reference without its fence: importing this module takes the guards away in the process that imports it."""

from __future__ import annotations

from dataclasses import replace

from fsdp_ref import fence
from fsdp_testing.adapters.ref import adapters

fence.remove()
