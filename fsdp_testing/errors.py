"""Errors of the harness itself, in one tree: each class says what it means and what to do.

A failing *test* is not in this tree; failures of ranks are reported through verdicts (`fsdp_testing.cases.records`).
"""

from __future__ import annotations


class HarnessError(Exception):
    """Base of every error that fsdp_testing raises about its own use or its own state."""


class InvalidArgument(HarnessError, ValueError):
    """An argument, marker, option or name is not usable; the message says where, expected, got and what to do."""


class UnsendableFunction(InvalidArgument):
    """A function cannot be named in another process: it must be importable (module level, not a lambda or closure)."""


class MissingExtra(HarnessError, ImportError):
    """A package that only some commands need is not installed; the message names the extra that brings it."""


class BackendUnavailable(HarnessError):
    """A communication backend cannot run on this machine; the message gives the one reason."""


class WorldFailed(HarnessError):
    """A function run on a world did not return on every rank.

    The message describes every rank; `outcome` has the same as data (`fsdp_testing.ranks.pool.WorldOutcome`).
    """

    def __init__(self, message: str, outcome: object = None) -> None:
        super().__init__(message)
        self.outcome = outcome


class PoolBroken(HarnessError):
    """The rank pool itself could not be started or was lost; its runs have no verdict."""


class CollectiveMismatch(HarnessError):
    """Ranks disagree about a collective; raised in the rank that notices, before bytes are exchanged."""


class InvalidImplementation(HarnessError):
    """An adapter does not follow the implementation protocol: a mistake of the adapter, not a sharding bug."""


class UnknownImplementation(InvalidArgument):
    """A name is neither built in, nor registered by an entry point, nor an import string; near names are listed."""


class InvalidRecord(HarnessError, ValueError):
    """A case, replay or report file is damaged, newer than this version, or not legal."""
