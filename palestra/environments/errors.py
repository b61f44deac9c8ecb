"""Errors of environments."""

from __future__ import annotations


class EnvironmentFailure(Exception):
    """An environment raised, hung, or answered something that is no answer. Says nothing about the policy."""


class EnvironmentTimeout(EnvironmentFailure):
    """A call into an environment took longer than it may."""


class UnknownEnvironment(ValueError, LookupError):
    """No environment goes by this name here."""


class TaskFileError(ValueError):
    """A task file cannot be read; says the file and the line."""
