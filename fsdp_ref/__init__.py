"""Reference implementation of fully sharded data parallel (flat-parameter FSDP)."""
