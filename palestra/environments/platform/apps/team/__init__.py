"""`team`: a mailbox with its calendar, the team's code forge, and a forum where its users talk."""

from palestra.environments.platform.apps.forge import FORGE
from palestra.environments.platform.apps.forum import FORUM
from palestra.environments.platform.apps.mail import MAIL
from palestra.environments.platform.apps.team.reports import add_reports
from palestra.environments.platform.apps.team.tasks_people import PEOPLE_TASKS
from palestra.environments.platform.apps.team.tasks_reports import REPORT_TASKS
from palestra.environments.platform.worlds import world_of

TEAM = world_of(
    (MAIL, FORGE, FORUM),
    key="team",
    title="Team",
    description="A world of three apps: mail with a calendar, code hosting, a forum.",
    stitch=add_reports,
    templates=(*PEOPLE_TASKS, *REPORT_TASKS),
)

__all__ = ["TEAM"]
