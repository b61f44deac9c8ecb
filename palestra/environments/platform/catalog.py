"""The apps that ship with the platform, by key."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

from palestra.environments.platform.app import TaskApp, TaskTemplate
from palestra.environments.platform.apps.conf import CONF
from palestra.environments.platform.apps.flights import FLIGHTS
from palestra.environments.platform.apps.forge import FORGE
from palestra.environments.platform.apps.forum import FORUM
from palestra.environments.platform.apps.keys import KEYS
from palestra.environments.platform.apps.mail import MAIL
from palestra.environments.platform.apps.returns import RETURNS
from palestra.environments.platform.apps.stay import STAY
from palestra.environments.platform.apps.team import TEAM
from palestra.environments.platform.apps.travel import TRAVEL
from palestra.environments.platform.errors import UnknownName
from palestra.environments.platform.long_tasks import with_long_tasks
from palestra.util.suggest import did_you_mean

APPS: dict[str, TaskApp] = {
    app.key: with_long_tasks(app) for app in (KEYS, MAIL, FORGE, STAY, FORUM, TRAVEL, TEAM, RETURNS, FLIGHTS)
}
"""The apps and worlds that are listed, by key."""
UNLISTED: dict[str, TaskApp] = {CONF.key: CONF}
"""For tools that test the platform: available by name, but not listed."""


def app_of(key: str) -> TaskApp:
    """The app with this key. Raises UnknownName with the nearest one."""
    found = APPS.get(key) or UNLISTED.get(key)
    if found is None:
        raise UnknownName(f"there is no app {key!r}; {did_you_mean(key, APPS)}")
    return found


def chosen_templates(
    apps: Sequence[str], templates: Collection[str], difficulties: Collection[str]
) -> list[tuple[TaskApp, TaskTemplate]]:
    """The templates with these names and difficulties, of these apps; empty: all but those of long tasks. Raises
    UnknownName."""
    return [
        (app, template)
        for app in ([app_of(name) for name in apps] if apps else APPS.values())
        for template in (*app.templates, *(app.long_templates if templates or difficulties else ()))
        if (not templates or template.name in templates) and (not difficulties or template.difficulty in difficulties)
    ]


@cache
def template_of(app: str, name: str) -> TaskTemplate:
    """The task template of this name. Raises UnknownName with the nearest one."""
    found = app_of(app).template(name)
    if found is None:
        names = [template.name for template in app_of(app).templates]
        raise UnknownName(f"{app} has no task template {name!r}; {did_you_mean(name, names)}")
    return found
