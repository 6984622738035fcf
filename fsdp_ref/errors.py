"""What can go wrong in the reference: one tree; classes mix in the built-in type that torch's FSDP raises."""

from __future__ import annotations


class FsdpError(Exception):
    """Base of every error that fsdp_ref raises."""
