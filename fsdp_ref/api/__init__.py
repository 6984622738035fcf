"""The public entry points: thin, over one code path."""

from fsdp_ref import fence

fence.install()
