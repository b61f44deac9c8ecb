"""Rules: what happens to incoming mail. Mail that was there before a rule stays where it is."""

from __future__ import annotations

from typing import Literal

from palestra.environments.platform.apps.mail.lookups import check_room, folder, label, message, sender_of
from palestra.environments.platform.apps.mail.schema import TRASH
from palestra.environments.platform.changes import Row
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.tool_context import ToolContext
from palestra.environments.platform.tool_schemas import ToolOutput, tool

MAX_CONTAINS = 200  # characters


@tool(writes=True)
def create_rule(
    context: ToolContext,
    field: Literal["sender", "subject", "body"],
    contains: str,
    action: Literal["move", "label", "flag", "mark_read", "delete"],
    target: str | None = None,
) -> ToolOutput:
    """Make a rule for future mail; target is the folder or label."""
    text = contains.strip().lower()
    if not 0 < len(text) <= MAX_CONTAINS:
        raise ToolError("bad_arguments", f"contains must have 1 to {MAX_CONTAINS} characters")
    values = {"field": field, "contains": text, "action": action, "target": _target(context, action, target)}
    same = " AND ".join(f"{name} = ?" for name in values)
    if (known := context.value(f"SELECT id FROM rules WHERE {same}", *values.values())) is not None:
        raise ToolError("exists", f"rule {known} is the same", "nothing more to do for the rule")
    check_room(context, "rules")
    return {"id": context.insert("rules", **values), **values}


def _target(context: ToolContext, action: str, target: str | None) -> str:
    match action:
        case "move":
            return folder(context, target or "")["name"]
        case "label":
            return label(context, target or "")["name"]
        case _ if target:
            raise ToolError("bad_arguments", f"{action} has no target", "target is for move and label only")
        case _:
            return ""


def apply_rules(context: ToolContext, number: int) -> None:
    """Applies rules to a new mail, in the order the rules were made. Upper and lower case are the same."""
    row = message(context, number)
    texts = {"sender": sender_of(row), "subject": row["subject"], "body": row["body"]}
    for rule in context.rows("SELECT * FROM rules ORDER BY id"):
        if rule["contains"] in texts[rule["field"]].lower():
            _apply(context, rule, number)


def _apply(context: ToolContext, rule: Row, number: int) -> None:
    match rule["action"]:
        case "move" | "delete":
            name = TRASH if rule["action"] == "delete" else rule["target"]
            context.run("UPDATE messages SET folder_id = ? WHERE id = ?", folder(context, name)["id"], number)
        case "label":
            label_id = label(context, rule["target"])["id"]
            context.run("INSERT INTO message_labels VALUES (?, ?) ON CONFLICT DO NOTHING", number, label_id)
        case "flag":
            context.run("UPDATE messages SET is_flagged = 1 WHERE id = ?", number)
        case _:
            context.run("UPDATE messages SET is_read = 1 WHERE id = ?", number)
