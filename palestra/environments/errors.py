"""Errors of environments."""

from __future__ import annotations


class EnvironmentFailure(Exception):
    """An environment raised, hung, or returned an invalid value. This says nothing about the policy."""


class EnvironmentTimeout(EnvironmentFailure):
    """A call into an environment took longer than allowed."""


class UnknownEnvironment(ValueError, LookupError):
    """There is no environment with this name here."""


class TaskFileError(ValueError):
    """A task file cannot be read; the message names the file and the line."""


class JudgeError(Exception):
    """A judge cannot be used, or its bound is reached; the message says which setting to change. The run ends, and can
    be resumed."""
