"""Errors of datasets, with their places."""

from __future__ import annotations

from msgspec import Struct


class RowPlace(Struct, frozen=True):
    """A row of a file: the number of its line, or of its row in a Parquet or Arrow file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"

    @property
    def short(self) -> str:
        """The place in a form that editors and terminals link."""
        return f"{self.file}:{self.line}"


class DatasetError(ValueError):
    """A file, or a line of it, cannot be used; the message says which, and why."""

    def __init__(self, problem: str, place: RowPlace | None = None) -> None:
        super().__init__(problem if place is None else f"{place}: {problem}")
        self.problem, self.place = problem, place


class DatasetNotFound(DatasetError):
    """There is no such file or dataset here."""
