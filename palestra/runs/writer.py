"""Writing a run's folder, by its trainer."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel

from palestra.config import dump_config
from palestra.runs.facts import flatten, gather_facts, summarize
from palestra.runs.lock import RunLock
from palestra.runs.names import drawn_names
from palestra.runs.pictures import write_pictures
from palestra.runs.reader import STOP, Part, RunReader, RunStatus
from palestra.runs.record_files import BadRunName, LineFile, RunError, write_json, write_records
from palestra.runs.rollout_records import (
    ForkFacts,
    Judgements,
    PicturePlaces,
    RolloutRecord,
    TokenRecord,
    TrainingUse,
    TurnSegments,
    TurnTimes,
    VersionCounts,
)
from palestra.types.rollouts import PROMPT_TOKENS, SAMPLED_TOKENS, Branch, Group, Rollout, TrainSequence, Turn
from palestra.util.json_types import JsonMapping, JsonObject

FORMAT = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class EventKind(StrEnum):
    START = "start"
    RESUME = "resume"
    CONFIG = "config"
    """The config was changed."""
    IMITATED = "imitated"
    """Solutions were imitated before the first step; the event names the weights."""
    EVOLVED = "evolved"
    """The run goes on with another one's weights and other settings; the event names the run."""
    CHECKPOINT = "checkpoint"
    STOP = "stop"
    """The run was asked to end after its step, and does."""
    WARNING = "warning"
    UNDONE = "undone"
    """An update moved the policy too far and was undone."""
    ERROR = "error"
    END = "end"


class RunFolder(RunReader):
    """A run's folder that this process alone writes."""

    def __init__(self, path: Path, lock: RunLock) -> None:
        super().__init__(path)
        self._lock = lock
        self.attempt = 1 + max((row.get("attempt", 0) for row in self.read_events()), default=0)
        """How often this run was started, including this time."""
        (path / STOP).unlink(missing_ok=True)  # it was for the attempt before
        self._metrics, self._events = LineFile(self.metrics_file), LineFile(self.events_file)
        write_json(self.summary_file, {"status": RunStatus.RUNNING, "attempts": self.attempt})

    @classmethod
    def create(cls, root: str | Path, name: str | None, config: BaseModel, facts: JsonMapping | None = None) -> Self:
        """Makes the folder of a new run, without a name under one of two words. `facts`: further facts, such as
        `tokenizer`. Raises RunError if the name is taken or not allowed."""
        root = Path(root).expanduser().absolute()
        if name and not NAME.fullmatch(name):
            allowed = "letters, digits, '.', '_' and '-', 100 at most"
            raise BadRunName(f"{name!r} cannot be the name of a run: use {allowed}")
        path = root / name if name else _new_folder(root)
        path.mkdir(parents=True, exist_ok=True)
        _refuse_taken(path)
        lock = RunLock(path / "lock")
        try:
            _refuse_taken(path)  # another process may have been quicker, and ended again
            _write_about(path, config, dict(facts or {}), created=time.time())
            run = cls(path, lock)
        except BaseException:
            lock.close()
            raise
        run.event(EventKind.START)
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Opens the folder of an existing run to continue it."""
        reader = RunReader(path)
        lock = RunLock(reader.lock_file)
        try:
            run = cls(reader.path, lock)
        except BaseException:
            lock.close()
            raise
        run.event(EventKind.RESUME)
        return run

    def change_config(self, config: BaseModel) -> None:
        """Saves the config if it differs, with an event that says in what."""
        about = self.read_about()
        if changes := _changes(about["config"], json.loads(dump_config(config))):
            _write_about(self.path, config, about["facts"], created=about["created"])
            self.event(EventKind.CONFIG, changes=changes)

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes a row of metrics; it is on disk when this returns. Readers join two rows of one step."""
        self._metrics.append({"step": step, "time": time.time(), "attempt": self.attempt, **metrics})

    def event(self, kind: str, **facts: object) -> None:
        """`kind` is an EventKind."""
        self._events.append({"time": time.time(), "attempt": self.attempt, "event": EventKind(kind), **facts})

    def write_rollouts(
        self,
        step: int,
        groups: Sequence[Group],
        sequences: Sequence[TrainSequence] | None = None,
        trainer_logprobs: Sequence[Sequence[float]] = (),
        entropies: Sequence[Sequence[float]] = (),
    ) -> None:
        """Writes rollouts for people to read; with the trained `sequences` also every token, its logprob, its advantage
        before it was scaled and, if `trainer_logprobs` and `entropies` have those of each sequence's `tokens[1:]`, its
        logprob by the trainer and the entropy there, NaN where it is not known."""
        rollouts = [rollout for group in groups for rollout in group.all_rollouts]
        if sequences is None:
            self._write_readable(Part.ROLLOUTS, step, groups, None)
            return
        trained = {one.rollout: one for one in sequences}
        scored = {one.rollout: logprobs for one, logprobs in zip(sequences, trainer_logprobs, strict=False)}
        spread = {one.rollout: values for one, values in zip(sequences, entropies, strict=False)}
        records = [
            _token_record(row, rollout.group, step, trained.get(row.id), scored.get(row.id), spread.get(row.id))
            for rollout in rollouts
            for row in rollout.rows
        ]
        write_records(self.step_file(Part.TOKENS, step), records)
        self._write_readable(Part.ROLLOUTS, step, groups, trained)

    def write_eval(self, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> None:
        self._write_readable(Part.EVAL, step, groups, None)
        self.write_metrics(step, metrics)

    def write_json(self, name: str, content: object) -> Path:
        """Writes a small file of the training loop atomically, such as `checkpoints/step_000050.json`."""
        write_json(self.path / name, content)
        return self.path / name

    def finish(self, status: RunStatus, **facts: object) -> JsonObject:
        """Writes the end of the run; returns the summary."""
        self.event(EventKind.END, status=status, **facts)
        events = self.read_events()
        summary = {"status": status, **summarize(self.read_metrics(), events), "ended": time.time(), **facts}
        write_json(self.summary_file, summary)
        return summary

    def close(self) -> None:
        self._metrics.close()
        self._events.close()
        self._lock.close()

    def _write_readable(
        self, part: Part, step: int, groups: Sequence[Group], trained: Mapping[str, TrainSequence] | None
    ) -> None:
        write_pictures(self.path, (one for group in groups for one in group.all_rollouts))
        records: list[RolloutRecord] = [
            {
                **_readable(one),
                **_forking(one, rollout),
                "level": group.task.level,
                "step": step,
                "attempt": self.attempt,
                **_use(one, trained),
            }
            for group in groups
            for rollout in group.rollouts
            for one in rollout.tree
        ]
        write_records(self.step_file(part, step), records)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _write_about(path: Path, config: BaseModel, facts: JsonObject, created: float) -> None:
    saved = json.loads(dump_config(config))
    about = {
        "format": FORMAT,
        "name": path.name,
        "kind": saved.get("kind"),
        "created": created,
        "seed": saved.get("seed"),
        "config": saved,
        "facts": {**gather_facts(), **facts},
    }
    (path / "logs").mkdir(exist_ok=True)
    write_json(path / "config.json", about)


def _refuse_taken(path: Path) -> None:
    if (path / "sweep.json").exists():
        raise RunError(f"{path.name!r} is the name of a sweep in {path.parent}; give the run another --name")
    if (path / "config.json").exists():
        raise RunError(
            f"run {path.name!r} already exists in {path.parent}; continue it with --resume {path.name}, or "
            "give a new run another --name"
        )


def _new_folder(root: Path) -> Path:
    """Makes a folder with a name that was free, also where several processes draw names at once."""
    for name in drawn_names():
        with suppress(FileExistsError):
            (root / name).mkdir(parents=True)
            return root / name
    raise RunError(f"no free name was found in {root}; give one with --name")


def _changes(old: object, new: object) -> dict[str, list[Any]]:
    """The changed keys, dotted, with old and new value."""
    before, after = flatten(old), flatten(new)
    return {
        key: [before.get(key), after.get(key)] for key in sorted({*before, *after}) if before.get(key) != after.get(key)
    }


def _readable(rollout: Rollout) -> RolloutRecord:
    return {
        "id": rollout.id,
        "group": rollout.group,
        "index": rollout.index,
        "task": rollout.task,
        "environment": rollout.environment,
        "reward": rollout.reward,
        "stop": rollout.stop,
        "turns": len(rollout.all_turns),
        "branches": len(rollout.branches),
        "tokens": rollout.response_length or int(rollout.metrics.get(SAMPLED_TOKENS, 0)),
        "prompt_tokens": len(rollout.prompt) or int(rollout.metrics.get(PROMPT_TOKENS, 0)),
        "version": rollout.oldest_version,
        **_versions(rollout),
        "temperature": rollout.temperature,
        "seed": rollout.seed,
        "seconds": rollout.seconds,
        "sample_s": sum(turn.sample_s for turn in rollout.all_turns),
        "env_s": sum(turn.env_s for turn in rollout.all_turns),
        **_turn_times(rollout),
        "metrics": rollout.metrics,
        **_judgements(rollout),
        "error": rollout.error,
        "failure": rollout.failure,
        "messages": rollout.messages,
    }


def _judgements(rollout: Rollout) -> Judgements:
    found: Judgements = {}
    if rollout.verdict:
        found["verdict"] = rollout.verdict
    if rollout.judgement:
        found["judgement"] = rollout.judgement
    return found


def _forking(rollout: Rollout, whole: Rollout) -> ForkFacts:
    """Returns a record's fields about forks: `whole` is the rollout itself, or the one that it was forked from."""
    if rollout is not whole:
        return {"fork_of": whole.id, "fork_turn": rollout.fork_turn}
    if rollout.forks:
        return {"forks": len(rollout.forks)}
    return {"not_forked": rollout.not_forked} if rollout.not_forked else {}


def _versions(rollout: Rollout) -> VersionCounts:
    """Returns how many tokens each version of the weights drew, if there were several."""
    counts = Counter(version for turn in rollout.all_turns for version in turn.versions)
    return {"versions": sorted(counts.items())} if len(counts) > 1 else {}


def _turn_times(rollout: Rollout) -> TurnTimes:
    """The seconds of sampling and of the environment for each turn, in the order of play, if they were measured."""
    times = [[round(turn.sample_s, 4), round(turn.env_s, 4)] for turn in rollout.turns_in_order]
    return {"turn_times": times} if any(any(one) for one in times) else {}


def _use(rollout: Rollout, trained: Mapping[str, TrainSequence] | None) -> TrainingUse:
    """Whether a rollout was trained on, and its advantage before it was scaled: the mean over the tokens that were
    sampled."""
    if trained is None:
        return {"used": None, "advantage": None}
    rows = [trained[row.id] for row in rollout.rows if row.id in trained]
    pairs = [pair for row in rows for pair in zip(_unscaled(row), row.sampled, strict=True)]
    advantages = [advantage for advantage, is_sampled in pairs if is_sampled]
    if not advantages:
        return {"used": bool(rows), "advantage": None}
    divisors = {row.divisor for row in rows}
    return {
        "used": True,
        "advantage": sum(advantages) / len(advantages),
        "advantage_divisor": divisors.pop() if len(divisors) == 1 else None,
    }


def _unscaled(row: TrainSequence) -> list[float]:
    """The advantages as they were before they were divided, without the last bits that this costs."""
    return [round(advantage * row.divisor, 9) for advantage in row.advantages]


def _of_sampled(values: Sequence[float] | None, trained: TrainSequence | None) -> list[float] | None:
    """Returns the values for `tokens[1:]` that belong to sampled tokens, in their order."""
    if values is None or trained is None:
        return None
    return [one for one, is_sampled in zip(values, trained.sampled[1:], strict=True) if is_sampled]


def _segments(turn: Turn) -> TurnSegments:
    return {"segments": turn.segments} if turn.segments else {}


def _pictures(row: Branch) -> PicturePlaces:
    return {"pictures": [[one.start, one.rows, one.file.digest] for one in row.pictures]} if row.pictures else {}


def _token_record(
    row: Branch,
    group: str,
    step: int,
    trained: TrainSequence | None,
    trainer_logprobs: Sequence[float] | None,
    entropies: Sequence[float] | None,
) -> TokenRecord:
    spread = _of_sampled(entropies, trained)
    return {
        "id": row.id,
        "group": group,
        "step": step,
        "agent": row.agent,
        "prompt": row.prompt,
        "turns": [
            {
                "observation": turn.observation,
                "tokens": turn.tokens,
                "logprobs": turn.logprobs,
                "stop": turn.stop,
                "version": turn.version,
                **_segments(turn),
            }
            for turn in row.turns
        ],
        **_pictures(row),
        "advantages": _unscaled(trained) if trained else None,
        "advantage_divisor": trained.divisor if trained else None,
        "trainer_logprobs": _of_sampled(trainer_logprobs, trained),
        "entropies": None if spread is None else [None if math.isnan(one) else round(one, 4) for one in spread],
    }
