"""`travel`: a mailbox with its calendar, and the hotels that the people in it want to stay at."""

from palestra.environments.platform.apps.mail import MAIL
from palestra.environments.platform.apps.stay import STAY
from palestra.environments.platform.apps.travel.requests import add_requests
from palestra.environments.platform.apps.travel.tasks import TRAVEL_TASKS
from palestra.environments.platform.worlds import world_of

TRAVEL = world_of(
    (MAIL, STAY),
    key="travel",
    title="Travel",
    description="A world of two apps: mail with a calendar, and hotel booking.",
    stitch=add_requests,
    templates=TRAVEL_TASKS,
)

__all__ = ["TRAVEL"]
