"""Runs a case: through an implementation on its ranks, and through the oracle in one process."""
