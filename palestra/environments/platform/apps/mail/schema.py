"""Tables of `mail`. Nothing is ever deleted from them except labels of a mail: what a person deletes goes to the trash.

Times are ISO to the second. Ids are given in order: the next one is the largest plus one.
"""

from __future__ import annotations

INBOX, SENT, ARCHIVE, TRASH, NEWSLETTERS = "Inbox", "Sent", "Archive", "Trash", "Newsletters"

SCHEMA = """
CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT NOT NULL, email TEXT NOT NULL UNIQUE);
CREATE TABLE contacts (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, email TEXT NOT NULL UNIQUE, company TEXT NOT NULL
);
CREATE TABLE folders (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE COLLATE NOCASE);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY,
    folder_id INTEGER NOT NULL REFERENCES folders (id),
    sender TEXT NOT NULL,
    sender_name TEXT NOT NULL,
    subject TEXT NOT NULL,
    body TEXT NOT NULL,
    sent_at TEXT NOT NULL,
    is_read INTEGER NOT NULL,
    is_flagged INTEGER NOT NULL,
    reply_to_id INTEGER REFERENCES messages (id),
    forward_of_id INTEGER REFERENCES messages (id)
);
CREATE INDEX messages_by_time ON messages (sent_at, id);
CREATE TABLE recipients (
    message_id INTEGER NOT NULL REFERENCES messages (id), email TEXT NOT NULL, kind TEXT NOT NULL,
    PRIMARY KEY (message_id, email)
);
CREATE TABLE attachments (
    id INTEGER PRIMARY KEY, message_id INTEGER NOT NULL REFERENCES messages (id), name TEXT NOT NULL,
    size_bytes INTEGER NOT NULL
);
CREATE INDEX attachments_by_message ON attachments (message_id);
CREATE TABLE labels (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE COLLATE NOCASE);
CREATE TABLE message_labels (
    message_id INTEGER NOT NULL REFERENCES messages (id), label_id INTEGER NOT NULL REFERENCES labels (id),
    PRIMARY KEY (message_id, label_id)
);
CREATE TABLE rules (
    id INTEGER PRIMARY KEY, field TEXT NOT NULL, contains TEXT NOT NULL, action TEXT NOT NULL, target TEXT NOT NULL
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, organizer TEXT NOT NULL, title TEXT NOT NULL, starts_at TEXT NOT NULL,
    ends_at TEXT NOT NULL, location TEXT NOT NULL
);
CREATE INDEX events_by_time ON events (starts_at, id);
CREATE TABLE attendees (
    event_id INTEGER NOT NULL REFERENCES events (id), email TEXT NOT NULL, response TEXT NOT NULL,
    PRIMARY KEY (event_id, email)
);
CREATE INDEX attendees_by_email ON attendees (email);
"""
