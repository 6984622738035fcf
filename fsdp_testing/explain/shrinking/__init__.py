"""Finds the simplest case that still fails in the same way."""
