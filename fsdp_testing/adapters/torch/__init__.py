"""Torch's own implementations: DDP, FSDP1 (with original and with flat parameters) and FSDP2."""
