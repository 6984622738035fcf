"""FakeProcessGroup: one process as any rank of any size. Collectives return at once and move nothing.

Good for shapes, counts and memory at sizes nobody can start; values after a collective mean nothing.
"""

from __future__ import annotations

from fsdp_testing.backends.registry import Backend


def _unavailable(size: int) -> str | None:
    try:
        from fsdp_testing.compat import fake_store
    except ImportError as error:
        return f"this torch has no FakeProcessGroup ({error})"
    return None if fake_store is not None else "this torch has no FakeProcessGroup"


FAKE = Backend(name="fake", device_type="cpu", unavailable=_unavailable, torch_backend="fake", single_process=True)
