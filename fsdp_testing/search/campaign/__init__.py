"""Random cases: drawn from numbers, run in batches, investigated where they fail, remembered."""
