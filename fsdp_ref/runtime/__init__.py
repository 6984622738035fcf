"""What happens when a unit runs: forward, backward, prefetch, reduction, execution order."""
