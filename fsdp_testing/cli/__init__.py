"""The command line `fsdp-verify`: one file per command."""
