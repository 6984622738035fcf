"""Compares what was observed with what was expected: pure functions of recorded values, no ranks, no clock."""
