"""The environments of a run: their tasks, and an episode of any of them."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from msgspec.structs import replace

from palestra.environments.errors import TaskFileError, UnknownEnvironment
from palestra.environments.guarded_calls import error_text, place_of
from palestra.environments.gym.rows import gym_tasks
from palestra.environments.registry import EnvConfig, EnvSpec, spec
from palestra.environments.session import Deferred, EnvSession
from palestra.environments.step_results import numbers_of, shown
from palestra.environments.tasks import Row, labelled_tasks, read_tasks, tasks_of_rows
from palestra.environments.text import mean_of_numbers
from palestra.environments.threads import CallThreads
from palestra.environments.verifiers.tasks import verifiers_tasks
from palestra.types.gym import is_gym
from palestra.types.rollouts import CODING, Task, is_verifiers

if TYPE_CHECKING:
    from palestra.config.environment_entries import EnvironmentEntry

log = logging.getLogger(__name__)

Split = Literal["train", "eval"]


class EntryTasks(NamedTuple):
    entry: EnvironmentEntry
    tasks: Sequence[Task]


class _Known(NamedTuple):
    entry: EnvironmentEntry
    spec: EnvSpec | None
    """None: it is played elsewhere, and not known here."""
    env_class: Callable[..., Any] | None


class EnvironmentSet:
    """The environments. Close it to end its threads; a thread that hangs in an environment is not waited for."""

    def __init__(
        self,
        entries: Sequence[EnvironmentEntry],
        *,
        env_threads: int,
        env_timeout_s: float,
        are_elsewhere: bool = False,
    ) -> None:
        """Raises UnknownEnvironment. `are_elsewhere`: nothing is played here, so only the players need to know the
        names; their tasks are in files then."""
        self._known: dict[str, _Known] = {}
        for place, entry in enumerate(entries):
            if entry.name in self._known:
                other = "call it gym:NAME" if is_gym(entry.name) else "register the environment under a second name"
                raise ValueError(
                    f"environments[{place}]: {entry.name!r} is listed twice; put its tasks into one file, or {other}"
                )
            self._known[entry.name] = _find(entry, place, are_elsewhere)
        self._timeout_s = env_timeout_s
        self._threads = CallThreads(env_threads)

    def tasks(self, split: Split) -> list[EntryTasks]:
        """Returns the tasks of each environment that has some. Raises TaskFileError, also for an environment without
        training tasks."""
        found = [EntryTasks(known.entry, _tasks(known, split)) for known in self._known.values()]
        for entry, tasks in found:
            if not tasks and split == "train":
                is_known = self._known[entry.name].spec or _has_other_players(entry.name)
                why = "brings no tasks of its own" if is_known else "is not installed here"
                raise TaskFileError(f"environment {entry.name!r} {why}; name a JSONL file: environments[].tasks")
        return [one for one in found if one.tasks]

    def open(self, task: Task) -> EnvSession:
        """Opens an episode of this task. Errors of its environment are raised by the session's `init`."""
        known = self._known.get(task.environment)
        if known is None or known.spec is None:
            raise UnknownEnvironment(f"environment {task.environment!r} is not played here")
        extras = copy.deepcopy(self.packed(task).extras)  # rollouts of one task share the record
        config = EnvConfig(copy.deepcopy(known.entry.config))
        make = partial(known.spec.make, env_config=config, extras=extras)
        deferred = Deferred(make, name=task.environment, is_async=hasattr(known.env_class, "init_async"))
        return EnvSession(deferred, self._threads, self._timeout_s, known.entry.max_turns)

    def is_played_here(self, environment: str) -> bool:
        """Whether its episodes can be opened in this process, turn by turn."""
        return self._known[environment].spec is not None

    def reward_range(self, environment: str) -> tuple[float, float] | None:
        """Returns the smallest and the largest reward of an episode, where the environment's class names them in
        `reward_range`."""
        found = getattr(self._known[environment].env_class, "reward_range", None)
        return (float(found[0]), float(found[1])) if isinstance(found, tuple | list) and len(found) == 2 else None

    def gold(self, task: Task) -> list[str] | None:
        """Returns what a perfect policy says, turn by turn, where the environment's class has a `gold`. Raises what
        that raises."""
        own = getattr(self._known[task.environment].env_class, "gold", None)
        found: Any = own(self.packed(task)) if callable(own) else None
        return None if found is None else [found] if isinstance(found, str) else [str(one) for one in found]

    def packed(self, task: Task) -> Task:
        """Returns the task with all settings of the config for its episodes: players elsewhere have nothing but the
        task."""
        entry = self._known[task.environment].entry
        turns = {} if entry.max_turns is None else {"max_turns": entry.max_turns}
        return replace(task, extras={**task.extras, **entry.extras, **turns})

    def aggregate(self, environment: str, metrics: Sequence[Mapping[str, float | str]]) -> dict[str, float]:
        """Combines the metrics of many episodes, by the environment's own rule."""
        aggregate = getattr(self._known[environment].env_class, "aggregate_metrics", mean_of_numbers)
        try:
            return numbers_of(aggregate([dict(one) for one in metrics]))
        except (Exception, SystemExit) as error:
            log.warning("%s.aggregate_metrics raised %s; means are used instead", environment, error_text(error))
            return mean_of_numbers(metrics)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _has_other_players(name: str) -> bool:
    """Whether tasks are played by servers of a gym, by verifiers, or by agents, and never turn by turn in this
    process."""
    return is_gym(name) or is_verifiers(name) or name == CODING


def _find(entry: EnvironmentEntry, place: int, is_elsewhere: bool) -> _Known:
    if _has_other_players(entry.name):
        return _Known(entry, None, None)
    try:
        found = spec(entry.name)
        return _Known(entry, found, found.load())
    except UnknownEnvironment as error:
        if is_elsewhere and entry.tasks is not None:
            return _Known(entry, None, None)
        hint = (
            "\n  if only other players have it, give its tasks as a JSONL file: environments[].tasks"
            if is_elsewhere
            else ""
        )
        raise UnknownEnvironment(f"environments[{place}].name: {error}{hint}") from error


def _tasks(known: _Known, split: Split) -> Sequence[Task]:
    entry = known.entry
    if is_gym(entry.name):
        return gym_tasks(entry, split)
    file = entry.tasks if split == "train" else entry.eval_tasks
    if entry.name == CODING:
        from palestra.environments.coding import entry_tasks  # it needs what sandboxes need, other environments do not

        return entry_tasks(entry, split)
    if is_verifiers(entry.name):
        return verifiers_tasks(entry, split)
    if file is not None:
        return read_tasks(file, entry.name)
    own = getattr(known.env_class, "tasks", None)
    if not callable(own):
        return []
    try:
        return _own_tasks(_asked_for_tasks(own, split, entry), entry.name, split)
    except TaskFileError:
        raise
    except (Exception, SystemExit) as error:
        raised = f"{error_text(error)}{place_of(error, __file__)}"
        raise TaskFileError(f"environment {entry.name!r}: tasks({split!r}) raised {raised}") from error


def _asked_for_tasks(own: Callable[..., Any], split: Split, entry: EnvironmentEntry) -> object:
    """Calls `tasks`; environments whose tasks depend on their config take it as `env_config`."""
    if "env_config" in inspect.signature(own).parameters:
        return own(split, env_config=EnvConfig(copy.deepcopy(entry.config)))
    return own(split)


def _own_tasks(found: Any, name: str, split: Split) -> Sequence[Task]:
    if isinstance(found, str | bytes | Mapping) or not (isinstance(found, Iterable) or hasattr(found, "__getitem__")):
        raise TaskFileError(
            f"environment {name!r}: tasks({split!r}) should return a list of rows or of Tasks, not {shown(found)}"
        )
    is_lazy = hasattr(found, "__len__") and hasattr(found, "__getitem__")
    tasks: Any = found if is_lazy else list(found)
    if not len(tasks):
        return []
    is_rows = isinstance(tasks[0], Mapping)
    # A sequence that makes tasks on demand is not checked as a whole here.
    for place, one in enumerate(tasks if is_rows or isinstance(tasks, list | tuple) else [tasks[0]]):
        if not isinstance(one, Mapping if is_rows else Task):
            expected = "a row, like those before" if is_rows else "a row (a dict with a prompt) or a Task"
            raise TaskFileError(
                f"environment {name!r}: tasks({split!r})[{place}] should be {expected}, but is {shown(one)}"
            )
    if is_rows:
        return tasks_of_rows([Row(f"{name} {split}[{place}]", row) for place, row in enumerate(tasks)], name)
    return labelled_tasks(tasks, name)
