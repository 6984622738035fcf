"""Judges a case: observations of ranks and the oracle's expectation in, a verdict out."""
