"""`mail`: a mailbox and a calendar, and tasks as one gives them to an assistant.

Mail that is sent only appears in Sent (and in the inbox, if sent to oneself): the world belongs to one person. Rules
apply to incoming mail; earlier mail has to be sorted by hand.
"""

from palestra.environments.platform.app import TaskApp
from palestra.environments.platform.apps.mail.calendar_tools import (
    create_event,
    find_free_slot,
    list_events,
    respond_event,
    update_event,
)
from palestra.environments.platform.apps.mail.mail_tools import (
    delete_message,
    get_message,
    label_message,
    list_folders,
    move_message,
    search_contacts,
    search_messages,
    set_flags,
)
from palestra.environments.platform.apps.mail.rules import create_rule
from palestra.environments.platform.apps.mail.schema import SCHEMA
from palestra.environments.platform.apps.mail.seed import fill, fill_with
from palestra.environments.platform.apps.mail.sending import forward_message, send_message
from palestra.environments.platform.apps.mail.sub_goals import SUB_GOALS
from palestra.environments.platform.apps.mail.tasks_calendar import CALENDAR_TASKS
from palestra.environments.platform.apps.mail.tasks_injected import INJECTED_TASKS
from palestra.environments.platform.apps.mail.tasks_mail import MAIL_TASKS
from palestra.environments.platform.apps.mail.tasks_search import SEARCH_TASKS

MAIL = TaskApp(
    key="mail",
    title="Mail",
    description="A mailbox with folders, labels and rules, and a calendar shared with colleagues.",
    version="v1",
    schema=SCHEMA,
    fill=fill,
    fill_with=fill_with,
    tools=(
        search_messages,
        get_message,
        list_folders,
        send_message,
        forward_message,
        move_message,
        set_flags,
        label_message,
        delete_message,
        create_rule,
        list_events,
        create_event,
        update_event,
        respond_event,
        find_free_slot,
        search_contacts,
    ),
    templates=(*MAIL_TASKS, *SEARCH_TASKS, *CALENDAR_TASKS, *INJECTED_TASKS),
    sub_goals=SUB_GOALS,
)

__all__ = ["MAIL"]
