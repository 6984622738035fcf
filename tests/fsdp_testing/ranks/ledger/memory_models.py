"""All results of a few accesses to shared memory by a few processors, on two models of a processor.

A program is a tuple of steps: `Store(place, value)`, `Load(place, register)`, and the two halves of a fence, `POST` and
`TRY_WAIT`, which change one word in a single step each. All places hold 0 at first.

- `total_store_order` (x86): each processor has a queue of stores that memory has not seen yet; its own loads look there
  first; a change in one step waits until the queue is empty.
- `weakly_ordered` (ARM, and weaker): a processor may take any step that no earlier one forbids. Forbidden is only: to
  exchange two accesses to one place, to move anything before a TRY_WAIT (acquire), to move anything behind a POST (release).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SEMAPHORE = "semaphore"


@dataclass(frozen=True, slots=True)
class Store:
    place: str
    value: int


@dataclass(frozen=True, slots=True)
class Load:
    place: str
    register: str


@dataclass(frozen=True, slots=True)
class Change:
    """One step that reads the semaphore and writes it."""

    by: int


POST, TRY_WAIT = Change(1), Change(-1)
FENCE = (POST, TRY_WAIT)

Step = Store | Load | Change
Programs = tuple[tuple[Step, ...], ...]
#: The values of all registers at the end.
Result = frozenset[tuple[str, int]]


def total_store_order(programs: Programs) -> set[Result]:
    """Every result that x86 allows."""
    start = ((0,) * len(programs), ((),) * len(programs), frozenset(), frozenset())
    return _results(start, lambda state: _tso_steps(programs, state))


def weakly_ordered(programs: Programs) -> set[Result]:
    """Every result that a processor allows which keeps nothing in order but what it must."""
    start = (tuple(frozenset(range(len(program))) for program in programs), (), frozenset(), frozenset())
    return _results(start, lambda state: _weak_steps(programs, state))


def _results(start, successors) -> set[Result]:
    found: set[Result] = set()
    seen, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        following = list(successors(state))
        if not following:
            found.add(state[3])
        for after in following:
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    return found


def _put(pairs: frozenset, name: str, value: int) -> frozenset:
    return frozenset({**dict(pairs), name: value}.items())


def _replaced(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


def _tso_steps(programs: Programs, state) -> Iterator:
    counters, queues, memory, registers = state
    for me, program in enumerate(programs):
        queue = queues[me]
        if queue:  # memory sees the oldest store
            place, value = queue[0]
            yield counters, _replaced(queues, me, queue[1:]), _put(memory, place, value), registers
        if counters[me] == len(program):
            continue
        step, advanced = program[counters[me]], _replaced(counters, me, counters[me] + 1)
        if isinstance(step, Store):
            yield advanced, _replaced(queues, me, (*queue, (step.place, step.value))), memory, registers
        elif isinstance(step, Load):
            own = [value for place, value in queue if place == step.place]
            value = own[-1] if own else dict(memory).get(step.place, 0)
            yield advanced, queues, memory, _put(registers, step.register, value)
        elif not queue:
            value = dict(memory).get(SEMAPHORE, 0) + step.by
            yield advanced, queues, _put(memory, SEMAPHORE, value), registers


def _weak_steps(programs: Programs, state) -> Iterator:
    left, _, memory, registers = state
    values = dict(memory)
    for me, program in enumerate(programs):
        for index in left[me]:
            step = program[index]
            if any(_must_follow(step, program[earlier]) for earlier in left[me] if earlier < index):
                continue
            done = _replaced(left, me, left[me] - {index})
            if isinstance(step, Store):
                yield done, (), _put(memory, step.place, step.value), registers
            elif isinstance(step, Load):
                yield done, (), memory, _put(registers, step.register, values.get(step.place, 0))
            else:
                yield done, (), _put(memory, SEMAPHORE, values.get(SEMAPHORE, 0) + step.by), registers


def _must_follow(step: Step, earlier: Step) -> bool:
    if earlier is TRY_WAIT or step is POST:
        return True
    return _place(step) == _place(earlier)


def _place(step: Step) -> str:
    return SEMAPHORE if isinstance(step, Change) else step.place
