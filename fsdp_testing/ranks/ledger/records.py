"""Collectives and groups, as the ledger knows them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

WAITS_FOR_ALL = -1
WAITS_FOR_NOBODY = -2
# A longer label would leave too little room for the members in a string of the ledger.
_LISTED_RANKS = 16


@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """A process group as all its ranks know it.

    `key` is equal on every member, `members` are ranks of the world in the group's order, `label` is for people;
    `blocking_host` says that a synchronous collective of this group keeps the calling thread waiting (gloo), not a device
    stream (NCCL).
    """

    key: int
    label: str
    members: tuple[int, ...]
    blocking_host: bool


def group_identity(name: str, members: tuple[int, ...], world_size: int, blocking_host: bool) -> GroupIdentity:
    """Return the identity of the group called `name` on all ranks."""
    digest = hashlib.blake2b(f"{name}|{members}".encode(), digest_size=8).digest()
    whole = len(members) == world_size and name in ("0", "default_pg")
    ranks = f"ranks {list(members)}" if len(members) <= _LISTED_RANKS else f"{len(members)} ranks"
    label = "default group" if whole else f"group {name[:12]!r} of {ranks}"
    return GroupIdentity(int.from_bytes(digest, "little"), label, members, blocking_host)


MAKING = "making of groups"
"""Label of what is compared of the calls of `new_group`: every rank makes them, members or not, and torch compares nothing."""


def making_of_groups(world_size: int) -> GroupIdentity:
    """Return what the ledger takes for a group of all ranks, on which each call of `new_group` is a collective."""
    identity = group_identity("new_group", tuple(range(world_size)), world_size, blocking_host=True)
    return replace(identity, label=MAKING)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One collective about to be issued; calls are compared by identity, the interception makes each once.

    `what` is everything that must be equal on all members: operation, reduce op, root, dtype and sizes. `text` shows
    it. `waits_for` names the members without which a synchronous call cannot return: all (`WAITS_FOR_ALL`), one, by its rank
    in the group (the root of a broadcast), or none (`WAITS_FOR_NOBODY`: the root itself, which only sends). Members that a
    backend merely happens to wait for do not count. `moves` says that values are exchanged; what does not is compared, and
    neither listeners nor faults are told of it.
    """

    what: tuple[Any, ...]
    text: str
    waits_for: int = WAITS_FOR_ALL
    moves: bool = True


def group_facts(strings: list[str]) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Return label and members of every group that a rank's strings name, by key."""
    named = (text.split("\x00") for text in strings if text.startswith("\x00"))
    return {
        # A simulated world (backend `fake`) may have too many members to fit; no reader needs them.
        int(key): (label, tuple(int(part) for part in members.split(",") if part))
        for _, key, label, members in named
    }


def group_string(group: GroupIdentity) -> str:
    """Return the string that `group_facts` reads."""
    return f"\x00{group.key}\x00{group.label}\x00{','.join(str(int(rank)) for rank in group.members)}"
