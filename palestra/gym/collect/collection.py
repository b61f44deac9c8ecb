"""A collection: rows of a file, played concurrently, each result written as it arrives."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

import orjson
from msgspec import Struct, field

from palestra.gym.collect.files import JsonLinesFile, OutputFiles, read_lines, write_whole
from palestra.gym.collect.playing import PlayedRow, RowPlayer, as_finished
from palestra.gym.collect.resuming import CollectionProgress, check_same, facts_of, progress_of, save_facts
from palestra.gym.collect.rows import Expansion, Key, Row, expanded, key_of, read_rows
from palestra.gym.errors import CollectError
from palestra.rollouts.gym.row_calls import RetryPolicy
from palestra.types.gym import FAILURE_CLASS, ROLLOUT_INDEX, TASK_INDEX
from palestra.util.json_types import JsonMapping, JsonObject


class CollectionRequest(Struct, frozen=True, kw_only=True):
    """What one collection should play."""

    input: Path
    output: Path
    expansion: Expansion = Expansion()
    concurrency: int = 64
    patience: RetryPolicy = RetryPolicy()
    resume: bool = False
    resume_changed: bool = False
    """Resume although rows or servers have changed since the beginning."""
    overwrite: bool = False


class CollectionStatus(Struct):
    """Progress of a collection; the same object throughout."""

    total: int
    done: int = 0
    """Number of rows with a result."""
    failed: int = 0
    """Number of rows that were given up."""
    attempts_failed: int = 0
    reward_sum: float = 0.0
    classes: Counter[str] = field(default_factory=Counter)
    """Failed attempts by class."""
    earlier: int = 0
    """How many of `done` and `failed` are from an earlier run."""

    @property
    def reward(self) -> float | None:
        return self.reward_sum / self.done if self.done else None

    def add(self, played: PlayedRow) -> None:
        self.attempts_failed += len(played.failures)
        self.classes.update(str(one[FAILURE_CLASS]) for one in played.failures)
        if played.result is None:
            self.failed += 1
            return
        self.done += 1
        reward = played.result.get("reward")
        self.reward_sum += reward if isinstance(reward, int | float) else 0.0


async def collect(
    request: CollectionRequest,
    player: RowPlayer,
    gym: JsonMapping,
    on_progress: Callable[[CollectionStatus], None] = lambda _: None,
) -> CollectionStatus:
    """Plays the open rows. Raises CollectError; what was written until then stays, and can be resumed."""
    files = OutputFiles(request.output)
    rows = expanded(read_rows(request.input), request.expansion)
    if not rows:
        raise CollectError(f"{request.input} has no rows to play")
    player.check(rows)
    facts = facts_of(rows, gym)
    with JsonLinesFile(files.results) as results, JsonLinesFile(files.failures) as failures:
        progress = _begun(files, results, failures, rows, request, facts)
        open_rows = [row for row in rows if progress.is_open(row, request.patience.attempts)]
        standing = _standing(rows, open_rows, progress)
        on_progress(standing)
        async with aclosing(play_all(player, open_rows, request.concurrency, progress.failed)) as all_played:
            async for played in all_played:
                _keep(played, results, failures)
                standing.add(played)
                on_progress(standing)
    return standing


def play_all(
    player: RowPlayer, rows: Sequence[Row], concurrency: int, failed_before: Mapping[Key, int] | None = None
) -> AsyncGenerator[PlayedRow]:
    """Yields rows in the order they are finished. Cancels its rollouts when it is closed."""
    before = failed_before or {}
    return as_finished(lambda row: player.play(row, before.get(key_of(row), 0)), rows, concurrency)


def _keep(played: PlayedRow, results: JsonLinesFile, failures: JsonLinesFile) -> None:
    try:
        if played.result is not None:
            results.append(played.result)
    except TypeError as error:  # a problem of one row must not end the others
        played.give_up(error)
    for failure in played.failures:
        try:
            failures.append(failure)
        except TypeError:  # the agent's error text may be nested too deeply as well
            failures.append({name: value for name, value in failure.items() if not isinstance(value, dict | list)})


def _begun(
    files: OutputFiles,
    results: JsonLinesFile,
    failures: JsonLinesFile,
    rows: Sequence[Row],
    request: CollectionRequest,
    facts: JsonMapping,
) -> CollectionProgress:
    """Writes down what is to be played, or compares it with what was."""
    if request.resume and files.inputs.exists():
        if not request.resume_changed:
            check_same(files, facts)
        return progress_of(files)
    if not (results.is_empty and failures.is_empty) and not request.overwrite:
        raise CollectError(f"{files.results} exists; continue it with --resume, or replace it with --overwrite")
    files.start_over(results, failures)
    save_facts(files, facts)  # first: rows without them could be resumed unchecked
    write_whole(files.inputs, b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return CollectionProgress(set(), Counter(), set())


def _standing(rows: Sequence[Row], open_rows: Sequence[Row], progress: CollectionProgress) -> CollectionStatus:
    closed = len(rows) - len(open_rows)
    done = sum(key_of(row) in progress.done for row in rows)
    return CollectionStatus(
        total=len(rows), done=done, failed=closed - done, reward_sum=progress.reward_sum, earlier=closed
    )


def delivered(output: Path) -> list[JsonObject]:
    """Returns all results, in the order of their tasks."""
    rows = list(read_lines(output))
    rows.sort(key=lambda one: (one[TASK_INDEX], one[ROLLOUT_INDEX]))
    return rows
