"""`forum`: communities, posts, votes, and their moderators."""

from palestra.environments.platform.app import TaskApp
from palestra.environments.platform.apps.forum import reading_tools as r
from palestra.environments.platform.apps.forum import writing_tools as w
from palestra.environments.platform.apps.forum.schema import FIXED, SCHEMA, VOLATILE
from palestra.environments.platform.apps.forum.seed import fill, fill_with
from palestra.environments.platform.apps.forum.tasks_many import MANY
from palestra.environments.platform.apps.forum.tasks_plain import PLAIN

FORUM = TaskApp(
    key="forum",
    title="Forum",
    description="Communities with posts, comments and votes; reading, writing, moderating.",
    version="v1",
    schema=SCHEMA,
    fill=fill,
    fill_with=fill_with,
    tools=(
        r.search_posts,
        r.get_post,
        r.list_comments,
        r.list_communities,
        r.get_community,
        w.create_post,
        w.comment,
        w.vote,
        w.edit_own,
        w.delete_own,
        w.save_post,
        w.join,
        w.report,
        w.mod_action,
        w.send_message,
    ),
    templates=(*PLAIN, *MANY),
    fixed=FIXED,
    volatile=VOLATILE,
)

__all__ = ["FORUM"]
