"""What model servers kept of a rollout's calls, put into its result.

Owns: which captures there are, clearing them before a rollout begins. Never touches: the files' own shape.
"""

from __future__ import annotations

from collections.abc import Iterable

from palestra.gym.collect.rows import Row, key_of
from palestra.gym.models.capture import CaptureFolder, folders
from palestra.gym.models.capture_records import model_call_capture, trajectory
from palestra.gym.models.prefix_merge import folded, rebuild
from palestra.gym.models.settings import read_capture
from palestra.gym.servers.agents import rollout_id_of
from palestra.util.json_types import JsonMapping, JsonObject


class Captured:
    """Of a gym that keeps exchanges, token ids, both or neither; in folders that this machine sees."""

    def __init__(
        self, calls: CaptureFolder | None = None, tokens: CaptureFolder | None = None, *, rebuilds: bool = True
    ) -> None:
        self._calls, self._tokens, self._rebuilds = calls, tokens, rebuilds

    @classmethod
    def of_gym(cls, settings: JsonMapping) -> Captured:
        """Raises GymConfigError."""
        found = read_capture(settings)
        return cls(*folders(found), rebuilds=found.tokens.rebuild_response)

    def clear(self, rows: Iterable[Row]) -> None:
        """Before they are played: those of an earlier run had the same ids."""
        ids = [name for row in rows if (name := rollout_id_of(row)) is not None]
        for folder in (self._calls, self._tokens):
            if folder is not None:
                folder.clear(ids)

    def into(self, result: JsonObject, row: Row) -> JsonObject:
        name = rollout_id_of(row)
        if name is None:
            return result
        if self._calls is not None:
            kept = self._calls.read(name)
            task, _ = key_of(row)
            result["ng_model_call_capture"] = model_call_capture(name, kept)
            result["ng_trajectory"] = trajectory(str(task), name, kept)
        if self._tokens is not None:
            kept = self._tokens.read(name)
            is_incomplete = kept.is_incomplete or kept.damaged > 0
            rebuilt = rebuild(kept.lines, is_incomplete=is_incomplete)
            return folded(result, rebuilt, rebuild_response=self._rebuilds)
        return result
