"""Errors of stored state. Each message is one line and says what to do."""

from __future__ import annotations


class StoreError(Exception):
    """The database cannot be opened, read or written."""

    is_lasting = False
    """Whether nothing could be written for longer than `write_wait_s`."""


class StoreLocked(StoreError):
    """Another server uses this database."""


class StoreTooNew(StoreError):
    """A newer Palestra has migrated this database."""


class CheckpointExists(StoreError):
    """The name is taken, and the save did not ask to overwrite."""


class KeyExists(StoreError):
    """A key of this name is in use."""


class QuotaExceeded(StoreError):
    """An owner has as much of something as its quota allows."""


class JournalError(Exception):
    """The journal is damaged, or cannot be written now."""

    is_lasting = False
    """Whether nothing could be written for longer than `write_wait_s`."""
