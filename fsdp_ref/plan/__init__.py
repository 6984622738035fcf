"""`python -m fsdp_ref.plan MODEL`: how a model is sharded over any number of ranks, drawn without processes and memory."""
