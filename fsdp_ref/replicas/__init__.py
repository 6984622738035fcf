"""Modules that every rank holds whole, with equal gradients."""
