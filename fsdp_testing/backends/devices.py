"""Which device does a rank compute on? Pure: sessions that run side by side share the devices, disjointly if they can.

With pytest-xdist, worker w of k may use its own part of the devices; only when the parts are too small for a world do
workers overlap, each beginning where the one before ended.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """The controller's place among those of one test session: worker `index` of `count`."""

    index: int = 0
    count: int = 1


def share_from(worker: str | None, count: str | None) -> Share:
    """Return the share that pytest-xdist's variables name ("gw3" of "8"); all of it when they do not."""
    digits = (worker or "").removeprefix("gw")
    if not digits.isdecimal() or not (count or "").isdecimal():
        return Share()
    total = int(count or "")
    return Share(int(digits) % total, total) if total > 0 else Share()


def devices_for(size: int, devices: int, share: Share) -> tuple[int, ...]:
    """Device index of every rank of a world.

    Args:
        size: Ranks of the world.
        devices: Devices of this machine.
        share: The controller's place among its session's.

    Returns:
        One index per rank, all different while `size <= devices`; worlds of different workers use different devices
        while `size * share.count <= devices`.
    """
    if devices < 1:
        return (0,) * size
    part = devices // share.count
    start = share.index * part if part >= size else share.index * size
    return tuple((start + rank) % devices for rank in range(size))
