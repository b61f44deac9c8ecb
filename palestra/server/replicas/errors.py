"""Errors of a replica, by what to do about them."""

from __future__ import annotations


class ReplicaError(Exception):
    """One line that says what happened, and where."""


class ReplicaRefused(ReplicaError):
    """The request is wrong: it would be refused again."""


class UnknownAdapter(ReplicaError):
    """The replica does not have the named adapter or model."""


class ReplicaBusy(ReplicaError):
    """The replica asks to retry later."""


class ReplicaLost(ReplicaError):
    """The replica does not answer, or not sensibly: another one may."""


class ReplicaUnfit(ReplicaError):
    """The replica answers, but cannot be used as it was started."""
