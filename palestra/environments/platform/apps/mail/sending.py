"""Tools that send mail. A sent mail is stored in Sent; one sent to oneself also arrives, and rules apply to it."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from palestra.environments.platform.apps.mail.lookups import addresses, check_room, folder, message, recipients_of
from palestra.environments.platform.apps.mail.rules import apply_rules
from palestra.environments.platform.apps.mail.schema import INBOX, SENT
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.expectations import normal
from palestra.environments.platform.tool_context import ToolContext
from palestra.environments.platform.tool_schemas import ToolOutput, tool

MAX_SUBJECT = 200  # characters
PREFIX = re.compile(r"((re|fwd?):\s*)+", re.IGNORECASE)


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    to: list[str]
    cc: list[str] = []
    subject: str
    body: str
    reply_to_id: int | None = None
    forward_of_id: int | None = None


@tool(writes=True)
def send_message(
    context: ToolContext,
    body: str,
    to: list[str] | None = None,
    subject: str | None = None,
    cc: list[str] | None = None,
    reply_to_id: int | None = None,
) -> ToolOutput:
    """Send a mail; a reply needs only body and reply_to_id."""
    if not body.strip():
        raise ToolError("bad_arguments", "body is empty", "say what the mail is to say")
    if reply_to_id is not None:
        answered = message(context, reply_to_id)
        to, subject = to or [answered["sender"]], _reply_subject(answered["subject"], subject)
    if not to or not (subject or "").strip():
        raise ToolError("bad_arguments", "to and subject are needed", "only a reply (reply_to_id) goes without")
    return _send(
        context, Outgoing(to=to, cc=cc or [], subject=str(subject).strip(), body=body, reply_to_id=reply_to_id)
    )


def reply_subject(subject: str) -> str:
    return subject if subject.lower().startswith("re:") else f"Re: {subject}"


def _reply_subject(answered: str, given: str | None) -> str:
    """Returns the subject of a reply, which is kept, so that its mails stay together."""
    requested = reply_subject(answered)
    if given and normal(PREFIX.sub("", given.strip())) != normal(PREFIX.sub("", answered)):
        raise ToolError("bad_arguments", f"a reply has the subject {requested!r}", "leave subject out")
    return requested


@tool(writes=True)
def forward_message(context: ToolContext, id: int, to: list[str], comment: str = "") -> ToolOutput:
    """Forward a mail with its attachments, with a comment if wanted."""
    if not to:
        raise ToolError("bad_arguments", "to is empty", "search_contacts(query) finds addresses")
    subject = forward_subject(message(context, id)["subject"])
    return _send(context, Outgoing(to=to, subject=subject, body=comment, forward_of_id=id))


def forward_subject(subject: str) -> str:
    return subject if subject.lower().startswith("fwd:") else f"Fwd: {subject}"


def _send(context: ToolContext, mail: Outgoing) -> ToolOutput:
    if len(mail.subject) > MAX_SUBJECT:
        raise ToolError("bad_arguments", f"a subject has at most {MAX_SUBJECT} characters", "shorten it")
    check_room(context, "messages")
    to = addresses(mail.to)
    cc = [one for one in addresses(mail.cc) if one not in to]
    sent = _insert(context, mail, to, cc, SENT)
    if context.me in (*to, *cc):
        apply_rules(context, _insert(context, mail, to, cc, INBOX))
    return {
        "id": sent,
        "to": recipients_of(context, sent, "to"),
        "cc": recipients_of(context, sent, "cc"),
        "subject": mail.subject,
        "date": context.now,
        "folder": SENT,
    }


def _insert(context: ToolContext, mail: Outgoing, to: Iterable[str], cc: Iterable[str], place: str) -> int:
    made = context.insert(
        "messages",
        folder_id=folder(context, place)["id"],
        sender=context.me,
        sender_name=context.variables["LOGGED_IN_NAME"],
        subject=mail.subject,
        body=mail.body,
        sent_at=context.now,
        is_read=int(place == SENT),
        is_flagged=0,
        reply_to_id=mail.reply_to_id,
        forward_of_id=mail.forward_of_id,
    )
    for kind, emails in (("to", to), ("cc", cc)):
        for email in emails:
            context.insert("recipients", message_id=made, email=email, kind=kind)
    if mail.forward_of_id is not None:
        context.run(
            "INSERT INTO attachments (message_id, name, size_bytes) "
            "SELECT ?, name, size_bytes FROM attachments WHERE message_id = ? ORDER BY id",
            made,
            mail.forward_of_id,
        )
    return made
