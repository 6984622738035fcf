"""What happens in forward and backward, in which order, and who waits for whom."""
