"""The tasks of an environment: which of them are played, which are there twice, whether they are the same each time."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from palestra.audit.findings import AuditFinding, FindingKind, Severity, finding
from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments.environment_set import EnvironmentSet, Split
from palestra.environments.errors import TaskFileError
from palestra.types.rollouts import Task

COMPARED = 20_000  # tasks of a split that are compared
COMPARE_S = 10.0  # of listing tasks that are made when they are asked for
LISTED = 50  # tasks whose listings are compared, each time they are listed
NAMES = frozenset(
    {"id", "idx", "index", "uid", "uuid", "key", "task_id", "split", "source", "data_source", "data_split"}
)
"""Fields of a row that name it, and say nothing about its content."""

Splits = Mapping[Split, Sequence[Task]]


def list_tasks(environments: EnvironmentSet) -> Splits:
    """Returns the tasks of the one environment of a set, by split. Raises TaskFileError if there are none at all."""
    found: dict[Split, Sequence[Task]] = {}
    error: TaskFileError | None = None
    for split in ("train", "eval"):
        try:
            listed = environments.tasks(split)
        except TaskFileError as failed:
            error = error or failed
            continue
        if listed:
            found[split] = listed[0].tasks
    if not found:
        raise error or TaskFileError("there are no tasks; name a JSONL file: --tasks FILE")
    return found


def chosen_tasks(splits: Splits, limit: int, seed: int) -> list[Task]:
    """Returns tasks from all of each split, half of them held-out ones; the same for the same seed."""
    chosen: list[Task] = []
    for place, split in enumerate(splits):
        tasks, left = splits[split], len(splits) - place
        count = min(len(tasks), -(-(limit - len(chosen)) // left))
        rng = random.Random(f"{seed}/{split}/chosen")
        chosen += [tasks[index] for index in sorted(rng.sample(range(len(tasks)), count))]
    return list({task.id: task for task in chosen}.values())


def judge_tasks(splits: Splits, again: Splits) -> list[AuditFinding]:
    """Compares the tasks with each other, and two listings of them."""
    return [*_unstable(splits, again), *_repeated_ids(splits), *_duplicates(splits)]


def _unstable(splits: Splits, again: Splits) -> Iterator[AuditFinding]:
    for split, tasks in splits.items():
        later = again.get(split, ())
        first = next((n for n in range(min(LISTED, len(tasks))) if n >= len(later) or tasks[n] != later[n]), None)
        if first is not None or len(tasks) != len(later):
            place = first or 0
            seen = f"Listed twice, task {place} of {split!r} is {tasks[place].id!r}, then {_id_at(later, place)}."
            yield finding(FindingKind.UNSTABLE_TASKS, Severity.ERROR, "lists the tasks twice", tasks[place].id, seen)
            return


def _id_at(tasks: Sequence[Task], place: int) -> str:
    if place >= len(tasks):
        return "missing"
    return f"{tasks[place].id!r} ({content_of(tasks[place])[:80]})"


def _repeated_ids(splits: Splits) -> Iterator[AuditFinding]:
    for split, tasks in splits.items():
        seen: set[str] = set()
        for task in _bounded(tasks):
            if task.id in seen:
                text = f"Two tasks of {split!r} have the id {task.id!r}."
                yield finding(FindingKind.DUPLICATE_TASKS, Severity.ERROR, "compares the tasks", task.id, text)
                return
            seen.add(task.id)


def _duplicates(splits: Splits) -> Iterator[AuditFinding]:
    contents = {split: [(task.id, digest(task)) for task in _bounded(tasks)] for split, tasks in splits.items()}
    trained = {content: task for task, content in contents.get("train", [])}
    held_out = [(task, trained[content]) for task, content in contents.get("eval", []) if content in trained]
    if held_out:
        (task, other), count = held_out[0], len(held_out)
        seen = (
            f"{count} of {len(contents['eval'])} held-out tasks are trained on, such as {task!r}, which is {other!r}."
        )
        yield finding(FindingKind.HELD_OUT_TRAINED, Severity.ERROR, "compares the tasks", task, seen, tasks=count)
    for split, tasks in contents.items():
        first: dict[str, str] = {}
        repeated = [(task, content) for task, content in tasks if first.setdefault(content, task) != task]
        if repeated:
            task, content = repeated[0]
            seen = f"{len(repeated)} of {len(tasks)} tasks of {split!r} are repeated: {task!r} is {first[content]!r}."
            severity = Severity.WARNING
            yield finding(FindingKind.DUPLICATE_TASKS, severity, "compares the tasks", task, seen, tasks=len(repeated))


def _bounded(tasks: Sequence[Task]) -> Iterator[Task]:
    """The tasks, until there are many of them or making them has taken long."""
    until_s = time.monotonic() + COMPARE_S
    for task in tasks[:COMPARED]:
        yield task
        if time.monotonic() > until_s:
            return


def content_of(task: Task) -> str:
    """Returns the prompt and what else decides about the task, as text: spaces, case and names do not count."""
    texts = [" ".join(str(message.get("content")).split()).casefold() for message in task.prompt]
    row = {key: value for key, value in task.extras.items() if str(key).lower() not in NAMES}
    return json.dumps([texts, row], sort_keys=True, default=str)


def digest(task: Task) -> str:
    return hashlib.blake2b(content_of(task).encode(errors="replace"), digest_size=16).hexdigest()


LISTING = """
import json, sys
from palestra.audit.task_lists import list_tasks, listing
from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments import EnvironmentSet
entry = EnvironmentEntry.model_validate_json(sys.stdin.read())
with EnvironmentSet([entry], env_threads=1, env_timeout_s=60) as environments:
    print("\\n" + json.dumps(listing(list_tasks(environments))))
"""


def listing(splits: Splits) -> dict[Split, list[str]]:
    """Returns ids and contents of the first tasks of each split, as they can be compared between processes."""
    return {split: [f"{task.id} {digest(task)}" for task in tasks[:LISTED]] for split, tasks in splits.items()}


def judge_fresh_listing(entry: EnvironmentEntry, splits: Splits, timeout_s: float) -> list[AuditFinding]:
    """Lists the tasks in a new process, in which texts have different hashes."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", LISTING],
            input=entry.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        )
        later = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    except (subprocess.SubprocessError, ValueError):
        return []  # what is registered in this process only cannot be listed in another
    for split, known in listing(splits).items():
        found = later.get(split, [])
        place = next((n for n, one in enumerate(known) if n >= len(found) or one != found[n]), None)
        if place is not None:
            task = splits[split][place].id
            other = found[place].rpartition(" ")[0] if place < len(found) else "missing"
            same = "has another content" if other == task else f"is {other!r}"
            seen = f"Task {place} of {split!r} is {task!r}; listed by another process, it {same}."
            return [finding(FindingKind.UNSTABLE_TASKS, Severity.ERROR, "lists the tasks in a new process", task, seen)]
    return []
