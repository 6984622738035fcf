"""Sources of cases: random ones, every small one, every saved state with every loader; and one loop over them."""
