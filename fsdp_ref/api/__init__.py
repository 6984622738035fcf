"""The public entry points: thin, over one code path."""

from fsdp_ref import fence, torch_names  # noqa: F401 - torch's names appear on what is made from here on

fence.install()
