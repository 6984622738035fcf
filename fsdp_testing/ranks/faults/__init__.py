"""Faults that are injected into ranks: at the n-th collective, optimizer step, save or load, or at once."""
