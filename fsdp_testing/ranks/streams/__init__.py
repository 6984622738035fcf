"""Race detection on streams, without a GPU: what a rank issued on which stream, and which accesses nothing orders.

`observe` records a history on the CPU, `races` judges it. Wherever code asks `torch.cpu` for streams and events, as FSDP1,
FSDP2 and the reference do, it gets ones that are recorded.
"""
