"""Race detection on streams, without a GPU: records what a rank issues on which stream, and finds unordered accesses.

`observe` records a history on the CPU, `races` judges it. Wherever code asks `torch.cpu` for streams and events, as FSDP1,
FSDP2 and the reference do, it gets ones that are recorded.
"""
