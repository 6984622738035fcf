"""The order in which units run, and what comes next.

Records positions only; prefetching uses :meth:`ExecutionOrder.next_forward` and
:meth:`ExecutionOrder.next_backward`. Guards compare it between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence


class ExecutionOrder:
    """Unit indices in order of execution.

    The order before forward is fixed by the first whole forward pass; a second record follows the latest pass, for
    overlap without a request. The order after forward, which backward walks in reverse, is new in every pass.

    Attributes:
        running: units entered so far in the current forward.
    """

    def __init__(self) -> None:
        self.first_forward: tuple[int, ...] | None = None
        self.last_forward: tuple[int, ...] | None = None
        self.running: list[int] = []
        # Whether the present pass has begun as those did; what comes next in one that went another way says nothing.
        self._as_first = self._as_last = False
        self._post: list[int] = []
        self._position: dict[int, int] = {}

    def begin_forward(self) -> None:
        """A root's forward begins."""
        self._as_first, self._as_last = self.first_forward is not None, self.last_forward is not None
        self.running = []
        self._post = []
        self._position = {}

    def pre_forward(self, unit: int) -> None:
        """Unit ``unit`` is about to run."""
        self._as_first = self._as_first and _continues(self.first_forward, len(self.running), unit)
        self._as_last = self._as_last and _continues(self.last_forward, len(self.running), unit)
        self.running.append(unit)

    def post_forward(self, unit: int) -> None:
        """Unit ``unit`` has run; of several runs the last counts."""
        self._position[unit] = len(self._post)
        self._post.append(unit)

    def end_forward(self) -> None:
        """A root's forward ended without error: remember its order."""
        self.last_forward = tuple(self.running)
        # Never replaced: a prefetch that all ranks derive from it must not change with one rank's later control flow.
        if self.first_forward is None:
            self.first_forward = self.last_forward

    def next_forward(self, *, of_first: bool) -> int | None:
        """Return the unit that comes next if this pass goes on as the first one (else: the latest) did.

        None once it has gone another way: what is gathered ahead and does not run is gathered in vain.
        """
        recorded, follows = (self.first_forward, self._as_first) if of_first else (self.last_forward, self._as_last)
        place = len(self.running)
        return recorded[place] if follows and recorded is not None and place < len(recorded) else None

    def next_backward(self, unit: int) -> int | None:
        """Return the unit that ran just before ``unit`` in forward: backward needs it next."""
        place = self._position.get(unit, 0)
        return self._post[place - 1] if place > 0 else None


def _continues(recorded: Sequence[int] | None, place: int, unit: int) -> bool:
    return recorded is not None and place < len(recorded) and recorded[place] == unit
