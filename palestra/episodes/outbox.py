"""Rows that have changed since the last save, each once, in its current form."""

from __future__ import annotations

from palestra.episodes.records import BoardEpisode, BoardGroup, BoardRun
from palestra.types.episode_rows import Change, EpisodeRow, Gone, GroupRow, RunRow, Tombstone


class Outbox:
    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], BoardRun | None] = {}
        self._groups: dict[tuple[str, str, str], BoardGroup | None] = {}
        self._episodes: dict[str, BoardEpisode | None] = {}
        self._tombstones: dict[str, Tombstone | None] = {}

    def run(self, run: BoardRun, *, is_gone: bool = False) -> None:
        self._runs[run.owner, run.name] = None if is_gone else run

    def group(self, group: BoardGroup, *, is_gone: bool = False) -> None:
        self._groups[group.run.owner, group.run.name, group.spec.group_id] = None if is_gone else group

    def episode(self, episode: BoardEpisode, *, is_gone: bool = False) -> None:
        self._episodes[episode.episode_id] = None if is_gone else episode

    def forget(self, row: GroupRow | EpisodeRow) -> None:
        """Deletes a row that was found on disk and is not valid."""
        if isinstance(row, GroupRow):
            self._groups[row.owner, row.run, row.group_id] = None
        else:
            self._episodes[row.episode_id] = None

    def tombstone(self, name: str, tombstone: Tombstone | None) -> None:
        self._tombstones[name] = tombstone

    def take(self) -> list[Change]:
        changes: list[Change] = []
        if self._runs:
            for key, run in self._runs.items():
                changes.append(Gone(RunRow, key) if run is None else run.row())
            self._runs.clear()
        if self._groups:
            for key, group in self._groups.items():
                changes.append(Gone(GroupRow, key) if group is None else group.row())
            self._groups.clear()
        if self._episodes:
            for key, episode in self._episodes.items():
                changes.append(Gone(EpisodeRow, key) if episode is None else episode.row())
            self._episodes.clear()
        if self._tombstones:
            for key, tombstone in self._tombstones.items():
                changes.append(Gone(Tombstone, key) if tombstone is None else tombstone)
            self._tombstones.clear()
        return changes
