"""How are torch's own implementations judged? DDP, FSDP1 (with original and with flat parameters) and FSDP2."""
