"""The version of the schema: finds out which one a database has, and brings it to the newest.

A new database gets the tables as they are declared, an older one is migrated by Alembic, which is not imported before.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, PrimaryKeyConstraint, String, Table, inspect, select

from palestra.store import tables
from palestra.store.errors import StoreTooNew

MIGRATIONS = Path(__file__).parent / "migrations"
VERSIONS = sorted(file.name[1:5] for file in (MIGRATIONS / "versions").glob("v*.py"))
"""Versions of all migrations, oldest first: the digits of their files' names."""
NEWEST = VERSIONS[-1]

alembic_version = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""Where Alembic keeps the version, as it makes the table itself."""


def is_current(conn: Connection) -> bool:
    """Whether no migration is missing. Raises `StoreTooNew` if the database has a migration that this version does not
    know."""
    found = _version(conn)
    if found is not None and found not in VERSIONS:
        raise StoreTooNew(
            f"the database {conn.engine.url!r} is newer than this program"
            f" (its version is {found}, this program's is {NEWEST}); upgrade palestra, "
            "or use another database"
        )
    return found == NEWEST


def bring_up_to_date(conn: Connection) -> None:
    """All of it happens in the transaction of the connection, or nothing."""
    if inspect(conn).has_table(alembic_version.name):
        migrate(conn)
        return
    tables.metadata.create_all(conn, checkfirst=False)
    alembic_version.create(conn)
    conn.execute(alembic_version.insert().values(version_num=NEWEST))


def migrate(conn: Connection, version: str = "head") -> None:
    """Migrates to the newest version, or to another one. All of it happens in the transaction of the connection, or
    nothing."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = conn
    command.upgrade(config, version)


def _version(conn: Connection) -> str | None:
    if not inspect(conn).has_table(alembic_version.name):
        return None
    return conn.scalar(select(alembic_version.c.version_num))
