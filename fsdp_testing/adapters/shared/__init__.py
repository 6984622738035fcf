"""What adapters of several implementations share: names, pieces, sites of modules, recomputation, replicated state."""
