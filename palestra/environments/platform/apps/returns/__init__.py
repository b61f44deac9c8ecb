"""`returns`: customers of a shop who want to send something back, and the policy that says who may."""

from palestra.environments.platform.app import TaskApp
from palestra.environments.platform.apps.returns.seed import FIXED, SCHEMA, fill
from palestra.environments.platform.apps.returns.tasks import TASKS
from palestra.environments.platform.apps.returns.tools import TOOLS

RETURNS = TaskApp(
    key="returns",
    title="Returns",
    description="The desk of a shop: customers on the line, their orders, returns and refunds.",
    version="v1",
    schema=SCHEMA,
    fill=fill,
    tools=TOOLS,
    templates=TASKS,
    fixed=FIXED,
    has_users=True,
)

__all__ = ["RETURNS"]
