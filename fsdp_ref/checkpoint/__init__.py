"""The state of a sharded model, saved and loaded in several forms."""
