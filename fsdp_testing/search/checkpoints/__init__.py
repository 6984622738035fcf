"""Saved states: those of every implementation load into every other, at every layout, equal to the bit."""
