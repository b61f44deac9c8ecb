"""Tables of `forum`."""

SCHEMA = """
CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE communities (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, about TEXT NOT NULL);
CREATE TABLE memberships (
    community_id INTEGER NOT NULL, user_id INTEGER NOT NULL, role TEXT NOT NULL, PRIMARY KEY (community_id, user_id)
);
CREATE TABLE rules (id INTEGER PRIMARY KEY, community_id INTEGER NOT NULL, text TEXT NOT NULL);
CREATE TABLE flairs (community_id INTEGER NOT NULL, name TEXT NOT NULL, PRIMARY KEY (community_id, name));
CREATE TABLE posts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, community_id INTEGER NOT NULL, author_id INTEGER NOT NULL,
    title TEXT NOT NULL, body TEXT NOT NULL, flair TEXT, score INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL DEFAULT 'open', created_at TEXT NOT NULL
);
CREATE TABLE comments (
    id INTEGER PRIMARY KEY AUTOINCREMENT, post_id INTEGER NOT NULL, parent_id INTEGER, author_id INTEGER NOT NULL,
    body TEXT NOT NULL, score INTEGER NOT NULL DEFAULT 0, state TEXT NOT NULL DEFAULT 'open', created_at TEXT NOT NULL
);
CREATE TABLE votes (
    user_id INTEGER NOT NULL, target TEXT NOT NULL, target_id INTEGER NOT NULL, value INTEGER NOT NULL,
    PRIMARY KEY (user_id, target, target_id)
);
CREATE TABLE saved (user_id INTEGER NOT NULL, post_id INTEGER NOT NULL, PRIMARY KEY (user_id, post_id));
CREATE TABLE reports (
    id INTEGER PRIMARY KEY AUTOINCREMENT, user_id INTEGER NOT NULL, target TEXT NOT NULL, target_id INTEGER NOT NULL,
    reason TEXT NOT NULL, created_at TEXT NOT NULL
);
CREATE TABLE mod_actions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, user_id INTEGER NOT NULL, target TEXT NOT NULL, target_id INTEGER NOT NULL,
    action TEXT NOT NULL, reason TEXT NOT NULL, created_at TEXT NOT NULL
);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, sender_id INTEGER NOT NULL, receiver_id INTEGER NOT NULL, body TEXT NOT NULL,
    created_at TEXT NOT NULL
);
CREATE INDEX comments_post ON comments (post_id);
CREATE INDEX posts_community ON posts (community_id);
"""

FIXED = {"users", "communities", "rules", "flairs"}
VOLATILE = {table: {"created_at"} for table in ("posts", "comments", "reports", "mod_actions", "messages")}
