"""What do sharded models and their optimizers look like on disk? So far: the full model state."""
