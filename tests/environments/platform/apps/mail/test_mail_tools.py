"""Finding, reading, putting away and sending mail; and what a model is told when it errs."""

from __future__ import annotations

import msgspec
import pytest

from palestra.environments.platform import SeedSize
from tests.environments.platform.apps.mail.conftest import MAIL, Mailbox

FIRST = Mailbox().first


def test_search_goes_newest_first_and_page_by_page(box: Mailbox):
    expected = [
        r["id"] for r in box.rows("SELECT id FROM messages WHERE folder_id != 4 ORDER BY sent_at DESC, id DESC")
    ]
    found, cursor = [], None
    while True:
        response = box.call("search_messages", limit=7, cursor=cursor)
        found += [mail["id"] for mail in response["messages"]]
        cursor = response.get("next_cursor")
        if cursor is None:
            break
    assert found == expected
    assert len(box.call("search_messages")["messages"]) == 10


@pytest.mark.parametrize("limit", [0, 51, -1])
def test_a_page_has_a_size(box: Mailbox, limit: int):
    assert box.refused("search_messages", limit=limit)["message"] == "limit must be 1 to 50"


def test_search_by_each_of_its_arguments(box: Mailbox):
    def ids(**given: object) -> set[int]:
        return {mail["id"] for mail in box.call("search_messages", limit=50, **given)["messages"]}

    mails = box.rows("SELECT m.*, f.name AS folder FROM messages m JOIN folders f ON f.id = m.folder_id")
    kept = [mail for mail in mails if mail["folder"] != "Trash"]
    sender = kept[0]["sender_name"]
    assert ids(folder="newsletters") == {m["id"] for m in mails if m["folder"] == "Newsletters"}
    assert ids(folder="Trash") == {m["id"] for m in mails if m["folder"] == "Trash"}
    assert ids(sender=sender.upper()) == {m["id"] for m in kept if m["sender_name"] == sender}
    assert ids(sender=kept[0]["sender"]) == ids(sender=sender)
    assert ids(query="AMOUNT invoice") == {m["id"] for m in kept if m["subject"].startswith("Invoice")}
    assert ids(query="harbor", unread=True) == {
        m["id"] for m in kept if "harbor" in (m["subject"] + m["body"]).lower() and not m["is_read"]
    }
    day = sorted(m["sent_at"] for m in kept)[len(kept) // 2][:10]
    assert ids(since=day) == {m["id"] for m in kept if m["sent_at"] >= day}
    assert ids(before=day, unread=False) == {m["id"] for m in kept if m["sent_at"] < day and m["is_read"]}
    sent = box.call("send_message", to=["a@b.example"], subject="Über", body="x")["id"]
    assert ids(query="Über") == {sent}
    assert ids(query="no such words anywhere") == set()


def test_reading_changes_nothing(box: Mailbox):
    for tool, given in (
        ("search_messages", {}),
        ("get_message", {"id": box.first}),
        ("list_folders", {}),
        ("search_contacts", {"query": "a"}),
        ("list_events", {"start": box.today, "end": box.today}),
        ("find_free_slot", {"attendees": [], "start": box.today, "end": box.today, "minutes": 30}),
    ):
        box.call(tool, **given)
    assert box.instance.changes() == []


def test_a_mail_is_shown_whole(box: Mailbox):
    (row,) = box.rows("SELECT * FROM messages WHERE subject LIKE 'Invoice %' ORDER BY id LIMIT 1")
    response = box.call("get_message", id=row["id"])
    assert response["from"] == f"{row['sender_name']} <{row['sender']}>"
    assert (response["to"], response["body"], response["date"]) == ([box.me], row["body"], row["sent_at"])
    assert [one["name"] for one in response["attachments"]] == [f"invoice-{row['subject'].split()[1]}.pdf"]


@pytest.mark.parametrize(
    ("tool", "given", "code", "word"),
    [
        ("get_message", {"id": 99999}, "not_found", "search_messages"),
        ("get_message", {"id": 2**70}, "bad_arguments", "get_message(id: integer)"),
        ("get_message", {"id": "1"}, "bad_arguments", "get_message(id: integer)"),
        ("search_messages", {"folder": "Spam"}, "not_found", "Inbox, Sent"),
        ("search_messages", {"since": "last week"}, "bad_date", "2026-03-04"),
        ("search_messages", {"before": "2026-13-01"}, "bad_date", "2026-03-04"),
        ("search_messages", {"since": "2026-03-04T10:00Z"}, "bad_date", "2026-03-04"),
        ("search_messages", {"query": "a b c d e f g h i"}, "bad_arguments", "fewer"),
        ("search_messages", {"cursor": "x"}, "bad_cursor", "next_cursor"),
        ("move_message", {"id": FIRST, "folder": "Nowhere"}, "not_found", "there are: Inbox"),
        ("label_message", {"id": FIRST, "label": "Nothing"}, "not_found", "Follow up"),
        ("set_flags", {"id": FIRST}, "bad_arguments", "read, flagged"),
        ("send_message", {"body": "x", "to": ["Ana"], "subject": "x"}, "bad_address", "search_contacts"),
        ("send_message", {"body": "x", "to": ["a@b, c@d"], "subject": "x"}, "bad_address", "search_contacts"),
        ("send_message", {"body": " ", "to": ["a@b.example"], "subject": "x"}, "bad_arguments", "say"),
        ("send_message", {"body": "x", "to": ["a@b.example"]}, "bad_arguments", "reply_to_id"),
        ("send_message", {"body": "x", "subject": "x"}, "bad_arguments", "reply_to_id"),
        ("send_message", {"body": "x", "reply_to_id": 99999}, "not_found", "search_messages"),
        ("send_message", {"body": "x", "to": [], "subject": "x"}, "bad_arguments", "reply_to_id"),
        ("send_message", {"body": "x", "to": ["a@b.example"], "subject": "x" * 201}, "bad_arguments", "shorten"),
        ("forward_message", {"id": FIRST, "to": []}, "bad_arguments", "search_contacts"),
        ("forward_message", {"id": 99999, "to": ["a@b.example"]}, "not_found", "search_messages"),
        ("create_rule", {"field": "subject", "contains": "x", "action": "move"}, "not_found", "there are: Inbox"),
        (
            "create_rule",
            {"field": "subject", "contains": "x", "action": "flag", "target": "Inbox"},
            "bad_arguments",
            "move and label",
        ),
        ("create_rule", {"field": "size", "contains": "x", "action": "flag"}, "bad_arguments", "body|sender|subject"),
    ],
)
def test_what_a_model_gets_wrong_it_is_told(box: Mailbox, tool: str, given: dict, code: str, word: str):
    response = box.refused(tool, **given)
    assert response["error"] == code
    assert word in response["hint"]


def test_deleting_goes_to_the_trash_and_back(box: Mailbox):
    (row,) = box.rows("SELECT id FROM messages WHERE folder_id = 1 ORDER BY id LIMIT 1")
    assert box.call("delete_message", id=row["id"])["folder"] == "Trash"
    assert box.refused("delete_message", id=row["id"])["error"] == "already_deleted"
    assert row["id"] in {m["id"] for m in box.call("search_messages", folder="Trash", limit=50)["messages"]}
    assert box.call("move_message", id=row["id"], folder="inbox")["folder"] == "Inbox"
    assert box.instance.changes() == []


def test_a_mail_goes_to_each_address_once(box: Mailbox):
    sent = box.call(
        "send_message", to=["B@x.example", "a@x.example", "b@x.example"], cc=["a@x.example"], subject="S", body="T"
    )
    assert (sent["to"], sent["cc"], sent["folder"]) == (["a@x.example", "b@x.example"], [], "Sent")
    response = box.call("get_message", id=sent["id"])
    assert (response["subject"], response["body"], response["read"], response["from"].endswith(f"<{box.me}>")) == (
        "S",
        "T",
        True,
        True,
    )


def test_a_reply_keeps_the_subject(box: Mailbox):
    first = box.call("get_message", id=box.first)
    sent = box.call("send_message", body="Yes.", reply_to_id=box.first)
    assert sent["subject"] == f"Re: {first['subject']}"
    assert f"<{sent['to'][0]}>" in first["from"]
    again = box.call("send_message", body="Yes.", reply_to_id=sent["id"], to=["a@b.example"], subject=first["subject"])
    assert (again["subject"], again["to"]) == (sent["subject"], ["a@b.example"])
    assert (
        "Re: " in box.refused("send_message", body="Yes.", reply_to_id=box.first, subject="Something else")["message"]
    )


def test_what_is_forwarded_is_attached(box: Mailbox):
    (row,) = box.rows("SELECT * FROM messages WHERE subject LIKE 'Invoice %' ORDER BY id LIMIT 1")
    sent = box.call("forward_message", id=row["id"], to=["a@b.example"], comment="Look.")
    response, first = box.call("get_message", id=sent["id"]), box.call("get_message", id=row["id"])
    assert (response["subject"], response["body"]) == (f"Fwd: {row['subject']}", "Look.")
    assert response["forwarded"]["body"] == row["body"]
    assert response["attachments"] == first["attachments"]


@pytest.mark.parametrize(
    ("action", "target", "met"),
    [
        ("move", "receipts", {"folder": "Receipts"}),
        ("delete", None, {"folder": "Trash"}),
        ("flag", None, {"flagged": True}),
        ("mark_read", None, {"read": True}),
        ("label", "urgent", {"labels": ["Urgent"]}),
    ],
)
def test_rules_work_on_mail_that_comes_in_and_on_no_other(box: Mailbox, action: str, target: str | None, met: dict):
    box.call("send_message", to=[box.me], subject="Parcel one", body="x")
    box.call("create_rule", field="subject", contains="PARCEL", action=action, target=target)
    assert (
        box.refused("create_rule", field="subject", contains="PARCEL", action=action, target=target)["error"]
        == "exists"
    )
    sent = box.call("send_message", to=[box.me], subject="Parcel two", body="x")
    came, before = box.call("get_message", id=sent["id"] + 1), box.call("get_message", id=sent["id"] - 1)
    assert {name: came.get(name) for name in met} == met
    assert {name: before.get(name) for name in met} != met
    assert (before["subject"], before["folder"], box.call("get_message", id=sent["id"])["folder"]) == (
        "Parcel one",
        "Inbox",
        "Sent",
    )


def test_a_loop_ends(box: Mailbox):
    (row,) = box.rows("SELECT count(*) AS n FROM messages")
    for _ in range(2000 - row["n"]):
        box.call("send_message", to=["a@b.example"], subject="S", body="T")
    assert box.refused("send_message", to=["a@b.example"], subject="S", body="T")["error"] == "full"


def test_contacts_are_found_by_name_address_and_company(box: Mailbox):
    (row,) = box.rows("SELECT name, email, company FROM contacts ORDER BY id LIMIT 1")
    for query in (row["name"], row["name"].upper(), row["email"]):
        assert box.call("search_contacts", query=query)["contacts"] == [row]
    assert row in box.call("search_contacts", query=row["company"], limit=50)["contacts"]
    assert box.call("search_contacts", query="nobody at all")["contacts"] == []


def test_folders_are_counted(box: Mailbox):
    response = box.call("list_folders")
    for folder in response["folders"]:
        (row,) = box.rows(
            "SELECT count(*) AS total, count(*) FILTER (WHERE is_read = 0) AS unread FROM messages "
            "WHERE folder_id = (SELECT id FROM folders WHERE name = ?)",
            folder["name"],
        )
        assert row == {"total": folder["total"], "unread": folder["unread"]}
    assert response["labels"] == ["Follow up", "Important", "Later", "Team", "Urgent"]


def test_tools_are_few_and_short():
    assert len(MAIL.tools) == 16
    assert len(msgspec.json.encode(MAIL.openai_tools())) < 6000  # some 1,500 tokens
    for tool in MAIL.tools:
        assert 1 <= len(tool.description.split()) <= 15


def test_the_same_calls_give_the_same_state():
    def played() -> str:
        box = Mailbox(SeedSize.TINY, 3)
        box.call("send_message", to=["a@b.example"], subject="S", body="T")
        box.call("create_event", title="E", start="2026-05-04T09:00", end="2026-05-04T10:00", attendees=["a@b.example"])
        box.call("set_flags", id=box.first, read=True, flagged=True)
        return box.instance.state_hash()

    assert played() == played()
