"""`flights`: passengers of an airline who want another flight or their money back, and the policy for them."""

from palestra.environments.platform.app import TaskApp
from palestra.environments.platform.apps.flights.seed import FIXED, SCHEMA, fill
from palestra.environments.platform.apps.flights.tasks import TASKS
from palestra.environments.platform.apps.flights.tools import TOOLS

FLIGHTS = TaskApp(
    key="flights",
    title="Flights",
    description="The desk of an airline: passengers on the line, bookings, changes and cancellations.",
    version="v1",
    schema=SCHEMA,
    fill=fill,
    tools=TOOLS,
    templates=TASKS,
    fixed=FIXED,
    has_users=True,
)

__all__ = ["FLIGHTS"]
