"""In which order do units run, and what comes next?

Records positions only; whoever gathers ahead asks :meth:`ExecutionOrder.next_forward` and
:meth:`ExecutionOrder.next_backward`. Ranks are compared in ``order_check``.
"""

from __future__ import annotations

from collections.abc import Sequence


class ExecutionOrder:
    """Unit indices in order of execution.

    The order before forward is fixed by the first whole forward pass; a second record follows the latest pass, for
    overlap that nobody asked for. The order after forward, which backward walks in reverse, is new in every pass.
    """

    def __init__(self) -> None:
        self.first_forward: tuple[int, ...] | None = None
        self.last_forward: tuple[int, ...] | None = None
        self.warned = False
        self._running: list[int] = []
        self._post: list[int] = []
        self._position: dict[int, int] = {}

    def begin_forward(self) -> None:
        """A root's forward begins."""
        self._running = []
        self._post = []
        self._position = {}

    def pre_forward(self, unit: int) -> None:
        """Unit ``unit`` is about to run."""
        self._running.append(unit)

    def post_forward(self, unit: int) -> None:
        """Unit ``unit`` has run; of several runs the last counts."""
        self._position[unit] = len(self._post)
        self._post.append(unit)

    def end_forward(self) -> None:
        """A root's forward ended without error: remember its order."""
        self.last_forward = tuple(self._running)
        if self.first_forward is None:
            self.first_forward = self.last_forward

    @property
    def running(self) -> Sequence[int]:
        """Units entered so far in the present forward."""
        return self._running

    def next_forward(self, *, recorded: Sequence[int] | None) -> int | None:
        """Return the unit that followed the present one in ``recorded``, at the same place of the order."""
        place = len(self._running)
        if recorded is None or place >= len(recorded) or recorded[place - 1] != self._running[-1]:
            return None
        return recorded[place]

    def next_backward(self, unit: int) -> int | None:
        """Return the unit that ran just before ``unit`` in forward: backward needs it next."""
        place = self._position.get(unit, 0)
        return self._post[place - 1] if place > 0 else None
