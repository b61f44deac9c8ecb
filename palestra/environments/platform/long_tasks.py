"""The families of long tasks of every app: lists of requests with a solution of 10, 20 or 50 calls.

The families:

    errands_10    requests of all kinds
    lookups_10    each of them needs a record that must be found first
    outages_10    requests of all kinds, with tools that fail now and then
    ladder_4      for small models, in the smallest app, from 4 to 12 calls
"""

from __future__ import annotations

from msgspec.structs import replace

from palestra.environments.platform.app import TaskApp, TaskTemplate
from palestra.environments.platform.composer import Composer, sub_goal_kinds

LENGTHS = {10: "4", 20: "5", 50: "6"}
"""The calls of a solution, and the difficulty of such tasks."""
LADDER = {4: "3a", 6: "3b", 8: "3c", 10: "3d", 12: "3e"}
"""The calls and the difficulty of the ladder for small models: in the smallest app, of the plainest requests."""
LADDER_APP, LADDER_KINDS = "keys", ("put_number", "put_value")
FAILING_PERCENT = 12
LOOKUP_CALLS = 2  # at least: one that finds, one that writes


def with_long_tasks(app: TaskApp) -> TaskApp:
    """Returns the app with its families of long tasks; where there is a user to talk to, it has none."""
    if app.has_users:
        return app
    kinds = sub_goal_kinds(app)
    errands, lookups = Composer(kinds), Composer(kinds, LOOKUP_CALLS)
    templates: list[TaskTemplate] = []
    for calls, level in LENGTHS.items():
        templates.append(errands.template(f"errands_{calls}", level, calls))
        templates.append(lookups.template(f"lookups_{calls}", level, calls))
        templates.append(errands.template(f"outages_{calls}", level, calls, failing_percent=FAILING_PERCENT))
    if app.key == LADDER_APP:
        short = Composer([kind for kind in kinds if kind.name in LADDER_KINDS], preambles=("Do all of this:",))
        templates += [short.template(f"ladder_{calls}", level, calls) for calls, level in LADDER.items()]
    return replace(app, long_templates=tuple(templates))
