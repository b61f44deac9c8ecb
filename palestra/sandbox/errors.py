"""Errors of sandboxes."""

from __future__ import annotations


class SandboxError(Exception):
    """A sandbox could not do what was asked of it."""


class SandboxUnavailable(SandboxError):
    """The backend cannot hold its promise here, so that nothing was started. The text says what is missing."""


class SandboxEnded(SandboxError):
    """The sandbox does not run: it was stopped, or ended on its own or by a limit."""
