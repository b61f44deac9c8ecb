"""`forge`: repositories, issues, pull requests, and checks that are a plain function of the files."""

from palestra.environments.platform.app import TaskApp
from palestra.environments.platform.apps.forge import code_tools as c
from palestra.environments.platform.apps.forge import issue_tools as i
from palestra.environments.platform.apps.forge.schema import FIXED, SCHEMA, VOLATILE
from palestra.environments.platform.apps.forge.seed import fill, fill_with
from palestra.environments.platform.apps.forge.sub_goals import SUB_GOALS
from palestra.environments.platform.apps.forge.tasks_code import CODE_TASKS
from palestra.environments.platform.apps.forge.tasks_issues import ISSUE_TASKS

FORGE = TaskApp(
    key="forge",
    title="Forge",
    description="Code hosting: repositories, issues, branches, pull requests.",
    version="v1",
    schema=SCHEMA,
    fill=fill,
    fill_with=fill_with,
    tools=(
        i.list_repos,
        c.get_file,
        c.list_files,
        c.list_commits,
        i.search_issues,
        i.get_issue,
        i.create_issue,
        i.update_issue,
        i.add_comment,
        i.create_label,
        c.create_branch,
        c.commit_file,
        c.list_pulls,
        c.create_pull,
        c.get_pull,
        c.review_pull,
        c.merge_pull,
    ),
    templates=(*ISSUE_TASKS, *CODE_TASKS),
    sub_goals=SUB_GOALS,
    fixed=FIXED,
    volatile=VOLATILE,
)

__all__ = ["FORGE"]
