"""The named checks, known and expected failures, and the one call that runs them."""
