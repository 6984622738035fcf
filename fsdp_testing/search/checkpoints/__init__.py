"""Saved states: the state of every implementation loads into every other, at every layout, equal to the bit."""
