"""Long tasks: several requests of an app's own task templates in one, whose solution has exactly so many calls.

    1. Find the mail from Noah Pereira and move it to Travel.
    2. Reply "Yes, Tuesday is fine." to the last mail that came from Marta Abbott.
    ...

A sub-goal is a template with params of its own. The composer plays each draw after those before it and, in a second
instance, before them, and keeps it if both give what all of them expect: the order of any two must not matter. So each
request means what it says of the state at the beginning.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NotRequired, TypedDict

from msgspec.structs import replace

from palestra.environments.platform.app import SeedDatabase, TaskApp, TaskTemplate
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.expectations import Expected, FreeText, InsertedRow, NewRow, mismatch, normal
from palestra.environments.platform.golden import play_solution
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.task_templates import Params, Solution
from palestra.environments.platform.worlds import at, within

MAX_TRIES = 400  # draws for one task
MAX_MISSES = 60  # draws in a row of which none fits: this world has no more of it
PREAMBLES = (
    "Please do all of this, and nothing else. Each point means the state as it is now, before you begin.",
    "Here is my list for today. Every point is about things as they stand before you begin. Change nothing else.",
    "There are {count} things to do. Take each as of now, before you have changed anything, and touch nothing else.",
    "I need you to work through this list, all of it and only that. It describes the state at the beginning.",
)


class SubGoalKind:
    """A template as a part of long tasks: of the app itself, or of an app of a world of several."""

    def __init__(self, template: TaskTemplate, part: TaskApp | None = None) -> None:
        self.template, self._part = template, part

    @property
    def name(self) -> str:
        return f"{self._part.key}.{self.template.name}" if self._part else self.template.name

    def params(self, rng: random.Random, seed: SeedDatabase) -> Params | None:
        return self.template.params(rng, self._own(seed))

    def solve(self, params: Params) -> Solution:
        solving = self.template.solve(params)
        return at(self._part.key, solving) if self._part else solving

    def expect(self, params: Params, seed: SeedDatabase, name: str) -> list[Expected]:
        """Returns what must change. New rows are named after the sub-goal, since their ids depend on the order."""
        own = self._own(seed)
        expected = _with_new_rows(self.template.expect(params, own), own, name)
        return within(self._part, expected) if self._part else expected

    def _own(self, seed: SeedDatabase) -> SeedDatabase:
        return seed.part(self._part.key) if self._part else seed


def sub_goal_kinds(app: TaskApp) -> list[SubGoalKind]:
    """Returns the templates of an app that change something and want no answer; of a world, those of its apps, too."""
    own = [SubGoalKind(one) for one in (*app.templates, *app.sub_goals)]
    parts = [SubGoalKind(one, part) for part in app.parts for one in (*part.templates, *part.sub_goals)]
    return [one for one in (*own, *parts) if one.template.answer is None and one.template.process is None]


class SubGoalDraw(TypedDict):
    """A sub-goal of a long task."""

    kind: str
    text: str
    params: Params
    calls: NotRequired[int]
    """Calls of its solution, once it was played."""


class Composer:
    """Makes templates of long tasks from kinds of sub-goals; what they have in common is `SubGoals`."""

    def __init__(self, kinds: Sequence[SubGoalKind], min_calls: int = 1, preambles: Sequence[str] = PREAMBLES) -> None:
        """`min_calls` is what the solution of each sub-goal has at least; a preamble stands above the list."""
        self._kinds, self._min_calls, self._preambles = kinds, min_calls, preambles

    @cached_property
    def _by_name(self) -> Mapping[str, SubGoalKind]:
        return {kind.name: kind for kind in self._kinds}

    def template(self, name: str, difficulty: str, calls: int, *, failing_percent: int = 0) -> TaskTemplate:
        return TaskTemplate(
            name=name,
            difficulty=difficulty,
            params=lambda rng, seed: self.compose(rng, seed, calls),
            prompts=("{text}",),
            solve=self._solve_all,
            expect=lambda params, seed: [one for goal in self.expect(params, seed) for one in goal],
            goals=self,
            failing_percent=failing_percent,
            has_own_eval_worlds=True,
            max_turns=calls + calls // 2 + 4,
        )

    def compose(self, rng: random.Random, seed: SeedDatabase, calls: int) -> Params | None:
        """Draws sub-goals whose solutions have so many calls together; None if this world does not have them."""
        draw = _Draw(self, seed)
        try:
            misses = 0
            for _ in range(MAX_TRIES):
                if draw.calls == calls or misses > MAX_MISSES:
                    break
                goal = self._draw(rng, seed)
                is_kept = goal is not None and draw.add(goal, calls - draw.calls, self._min_calls)
                misses = 0 if is_kept else misses + 1
        finally:
            draw.close()
        if draw.calls != calls:
            return None
        return {"goals": draw.goals, "calls": calls, "text": self._text(rng, draw.goals)}

    def expect(self, params: Params, seed: SeedDatabase) -> list[list[Expected]]:
        return [self.expect_goal(goal, seed, number) for number, goal in enumerate(params["goals"])]

    def solve(self, params: Params) -> list[Solution]:
        return [self.solve_goal(goal) for goal in params["goals"]]

    def another(self, rng: random.Random, params: Params, seed: SeedDatabase, number: int) -> Solution | None:
        goal = params["goals"][number]
        kind, wanted = self._by_name[goal["kind"]], self.expect_goal(goal, seed, number)
        for _ in range(MAX_MISSES):
            drawn = kind.params(rng, seed)
            if drawn is not None and kind.expect(drawn, seed, str(number)) != wanted:
                return kind.solve(drawn)
        return None

    def expect_goal(self, goal: SubGoalDraw, seed: SeedDatabase, number: int) -> list[Expected]:
        return self._by_name[goal["kind"]].expect(goal["params"], seed, str(number))

    def solve_goal(self, goal: SubGoalDraw) -> Solution:
        return self._by_name[goal["kind"]].solve(goal["params"])

    def _draw(self, rng: random.Random, seed: SeedDatabase) -> SubGoalDraw | None:
        kind = rng.choice(self._kinds)
        params = kind.params(rng, seed)
        if params is None:
            return None
        return {"kind": kind.name, "text": kind.template.prompt(params, rng), "params": params}

    def _solve_all(self, params: Params) -> Solution:
        for solving in self.solve(params):
            yield from solving

    def _text(self, rng: random.Random, goals: Sequence[SubGoalDraw]) -> str:
        lines = [f"{number}. {goal['text']}" for number, goal in enumerate(goals, 1)]
        return "\n".join([rng.choice(self._preambles).format(count=len(goals)), *lines])


class _Draw:
    """The sub-goals of one task so far, and two instances of its world on which others are tried."""

    def __init__(self, composer: Composer, seed: SeedDatabase) -> None:
        self._composer, self._seed = composer, seed
        self._after, self._before = Instance(seed), Instance(seed)
        self._expected: list[Expected] = []
        self.goals: list[SubGoalDraw] = []
        self.calls = 0

    def close(self) -> None:
        self._after.close()
        self._before.close()

    def add(self, goal: SubGoalDraw, left: int, min_calls: int) -> bool:
        """Keeps a sub-goal if it has room, and goes with each of those before it in both orders."""
        state = self._after.snapshot()
        try:
            calls = self._fitting_calls(goal, left, min_calls)
        except (PlatformError, LookupError, ValueError, RuntimeError):  # its solution does not work here
            calls = 0
        if not calls:
            self._after.restore(state)
            return False
        self.goals.append({**goal, "calls": calls})
        self._expected += self._composer.expect_goal(goal, self._seed, len(self.goals) - 1)
        self.calls += calls
        return True

    def _fitting_calls(self, goal: SubGoalDraw, left: int, min_calls: int) -> int:
        """Returns the calls of the solution; 0 if the sub-goal does not fit."""
        new = self._composer.expect_goal(goal, self._seed, len(self.goals))
        if not new or _are_twins(new, self._expected):
            return 0
        calls = self._play(goal, self._after)
        rest = left - calls
        if rest < 0 or calls < min_calls or 0 < rest < min_calls:
            return 0
        expected = [*self._expected, *new]
        if mismatch(expected, self._after.changes()):
            return 0
        self._before.reset()
        for one in (goal, *self.goals):
            self._play(one, self._before)
        return 0 if mismatch(expected, self._before.changes()) else calls

    def _play(self, goal: SubGoalDraw, instance: Instance) -> int:
        return len(play_solution(self._composer.solve_goal(goal), instance).steps)


def _with_new_rows(expected: Sequence[Expected], seed: SeedDatabase, name: str) -> list[Expected]:
    """Replaces ids that the seed does not have, and references to them, by `NewRow`."""
    new = {
        (one.table, one.fields["id"]): NewRow(f"{name}/{one.table}/{one.fields['id']}")
        for one in expected
        if isinstance(one, InsertedRow) and isinstance(one.fields.get("id"), int)
    }
    references = {(f"{table.removesuffix('s')}_id", number): row for (table, number), row in new.items()}

    def renamed(one: Expected) -> Expected:
        if not isinstance(one, InsertedRow):
            return one
        own = {column: references.get((column, value), value) for column, value in _integers(one.fields)}
        if (row := new.get((one.table, one.fields.get("id")))) is not None:
            own["id"] = row
        return replace(one, fields={**one.fields, **own})

    return [renamed(one) for one in expected]


def _integers(fields: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    return ((column, value) for column, value in fields.items() if isinstance(value, int))


def _are_twins(new: Sequence[Expected], before: Sequence[Expected]) -> bool:
    """Whether two sub-goals make rows that only those which refer to them tell apart."""
    known = {_content(one) for one in before if _is_named(one)}
    return any(_content(one) in known for one in new if _is_named(one))


def _is_named(one: Expected) -> bool:
    return isinstance(one, InsertedRow) and isinstance(one.fields.get("id"), NewRow)


def _content(one: Expected) -> str:
    fields = one.fields if isinstance(one, InsertedRow) else {}
    shown = {
        name: normal(value.wanted) if isinstance(value, FreeText) else value
        for name, value in fields.items()
        if not isinstance(value, NewRow)
    }
    return f"{one.table} {sorted(shown.items(), key=str)}"
