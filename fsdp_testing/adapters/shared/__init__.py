"""What do adapters of several implementations share? Names, pieces, sites of modules, recomputation, replicated state."""
