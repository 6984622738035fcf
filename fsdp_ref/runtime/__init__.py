"""The runtime of forward and backward: its steps, their order, and their waits."""
