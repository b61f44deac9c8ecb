"""Maps groups at the server to requests of this run, and versions to its weights, across restarts."""

from __future__ import annotations

import hashlib
import re
import secrets
from bisect import bisect_right
from pathlib import Path

import msgspec
from msgspec import Struct

from palestra.runs.run_state import RunState, StateError
from palestra.runs.writer import write_json
from palestra.types.rollouts import GroupRequest

FILE = "episodes.json"
NAME = re.compile(r"(\w+)/(?:g(\d+)|e(\d+)-(\d+)-\w+)(?:\.\d+)?")


class Lineage(Struct, kw_only=True):
    """One start of the run: from then on, version `version` + n at the server is step `step` + n of this run."""

    version: int
    step: int


class GroupIdentity(Struct, kw_only=True):
    nonce: str
    """Keeps runs of the same name in different folders from taking each other's groups."""
    lineages: list[Lineage] = []

    @classmethod
    def load(cls, folder: Path) -> GroupIdentity:
        file = folder / FILE
        if not file.exists():
            return cls(nonce=secrets.token_hex(4))
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise StateError(
                f"{file} cannot be read ({error}); without it, this run cannot find its episodes"
            ) from None

    def begin(self, folder: Path, version: int, step: int) -> None:
        """Notes a start of the run; it is on disk before anything is published under it."""
        while self.lineages and self.lineages[-1].version >= version:  # a start that published nothing
            self.lineages.pop()
        self.lineages.append(Lineage(version=version, step=step))
        write_json(folder / FILE, msgspec.to_builtins(self))

    def version_of(self, step: int) -> int:
        now = self.lineages[-1]
        return now.version + step - now.step

    def step_of(self, version: int) -> int:
        """Returns the step of a version, also for weights from before a resume, which may have been given up since."""
        place = bisect_right(self.lineages, version, key=lambda one: one.version) - 1
        if place < 0:
            return 0
        return self.lineages[place].step + version - self.lineages[place].version


class GroupName(Struct, frozen=True, kw_only=True):
    """The parts of a group's id."""

    is_ours: bool
    position: int | None = None
    """Position in the order of tasks; None: the group belongs to an evaluation."""
    attempt: int = 0
    step: int = 0
    """Step of the evaluation."""


class GroupNames:
    """Gives the same id to the same position, whenever it is requested. Ids of evaluations include the start of the
    run, because after a resume the weights of a step may differ."""

    def __init__(self, nonce: str, attempt: int) -> None:
        self._nonce, self._attempt = nonce, attempt

    def train(self, request: GroupRequest, generation: int) -> str:
        """`generation` is 1, or more if the previous group of this position is committed, cancelled or had other
        content."""
        return self._named(f"g{request.position:06d}", generation)

    def eval(self, request: GroupRequest, generation: int) -> str:
        task = hashlib.blake2b(request.id.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        return self._named(f"e{self._attempt}-{request.step}-{task}", generation)

    def read(self, group_id: str) -> GroupName:
        found = NAME.fullmatch(group_id)
        if found is None or found[1] != self._nonce:
            return GroupName(is_ours=False)
        if found[2] is not None:
            return GroupName(is_ours=True, position=int(found[2]))
        return GroupName(is_ours=True, attempt=int(found[3]), step=int(found[4]))

    def is_settled(self, group_id: str, state: RunState) -> bool:
        """Whether a group was used, set aside, or will never be requested again."""
        named = self.read(group_id)
        if not named.is_ours:
            return True
        if named.position is None:
            return named.attempt != self._attempt or named.step <= state.evaluated
        return named.position < state.position and named.position not in state.pending

    def _named(self, name: str, generation: int) -> str:
        return f"{self._nonce}/{name}" + (f".{generation}" if generation > 1 else "")
