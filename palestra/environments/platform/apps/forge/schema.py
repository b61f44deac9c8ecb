"""Tables of `forge`. A branch has its own copy of every file; a commit changes one of them."""

SCHEMA = """
CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE orgs (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE repos (id INTEGER PRIMARY KEY, org_id INTEGER NOT NULL, name TEXT NOT NULL UNIQUE, about TEXT NOT NULL);
CREATE TABLE protections (repo_id INTEGER NOT NULL, branch TEXT NOT NULL, PRIMARY KEY (repo_id, branch));
CREATE TABLE branches (
    repo_id INTEGER NOT NULL, name TEXT NOT NULL, origin TEXT NOT NULL, origin_commit INTEGER NOT NULL,
    PRIMARY KEY (repo_id, name)
);
CREATE TABLE files (
    repo_id INTEGER NOT NULL, branch TEXT NOT NULL, path TEXT NOT NULL, content TEXT NOT NULL,
    PRIMARY KEY (repo_id, branch, path)
);
CREATE TABLE commits (
    id INTEGER PRIMARY KEY AUTOINCREMENT, repo_id INTEGER NOT NULL, branch TEXT NOT NULL, author_id INTEGER NOT NULL,
    message TEXT NOT NULL, path TEXT NOT NULL, before TEXT, after TEXT NOT NULL, created_at TEXT NOT NULL
);
CREATE TABLE labels (repo_id INTEGER NOT NULL, name TEXT NOT NULL, color TEXT NOT NULL, PRIMARY KEY (repo_id, name));
CREATE TABLE milestones (repo_id INTEGER NOT NULL, title TEXT NOT NULL, PRIMARY KEY (repo_id, title));
CREATE TABLE issues (
    repo_id INTEGER NOT NULL, number INTEGER NOT NULL, author_id INTEGER NOT NULL, title TEXT NOT NULL,
    body TEXT NOT NULL, state TEXT NOT NULL, milestone TEXT, created_at TEXT NOT NULL, updated_at TEXT NOT NULL,
    PRIMARY KEY (repo_id, number)
);
CREATE TABLE issue_labels (
    repo_id INTEGER NOT NULL, number INTEGER NOT NULL, label TEXT NOT NULL, PRIMARY KEY (repo_id, number, label)
);
CREATE TABLE assignees (
    repo_id INTEGER NOT NULL, number INTEGER NOT NULL, user_id INTEGER NOT NULL, PRIMARY KEY (repo_id, number, user_id)
);
CREATE TABLE comments (
    id INTEGER PRIMARY KEY AUTOINCREMENT, repo_id INTEGER NOT NULL, number INTEGER NOT NULL, author_id INTEGER NOT NULL,
    body TEXT NOT NULL, created_at TEXT NOT NULL
);
CREATE TABLE pulls (
    repo_id INTEGER NOT NULL, number INTEGER NOT NULL, author_id INTEGER NOT NULL, title TEXT NOT NULL,
    body TEXT NOT NULL, head TEXT NOT NULL, base TEXT NOT NULL, state TEXT NOT NULL, created_at TEXT NOT NULL,
    PRIMARY KEY (repo_id, number)
);
CREATE TABLE reviews (
    id INTEGER PRIMARY KEY AUTOINCREMENT, repo_id INTEGER NOT NULL, number INTEGER NOT NULL, author_id INTEGER NOT NULL,
    verdict TEXT NOT NULL, body TEXT NOT NULL, created_at TEXT NOT NULL
);
CREATE INDEX comments_issue ON comments (repo_id, number);
CREATE INDEX commits_branch ON commits (repo_id, branch);
"""

FIXED = {"users", "orgs", "repos", "protections", "milestones"}
VOLATILE = {
    "issues": {"created_at", "updated_at"},
    **{table: {"created_at"} for table in ("commits", "comments", "pulls", "reviews")},
}
