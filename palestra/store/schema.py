"""The version of the schema: finds out which one a database has, and migrates it to the newest."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from palestra.store.errors import StoreTooNew

MIGRATIONS = Path(__file__).parent / "migrations"


def is_current(conn: Connection) -> bool:
    """Whether no migration is missing. Raises `StoreTooNew` if the database has a migration that this version does not
    know."""
    script = ScriptDirectory(str(MIGRATIONS))
    found = MigrationContext.configure(conn).get_current_revision()
    if found is not None and found not in {step.revision for step in script.walk_revisions()}:
        raise StoreTooNew(
            f"the database {conn.engine.url!r} is newer than this program"
            f" (its version is {found}, this program's is {script.get_current_head()}); upgrade palestra, "
            "or use another database"
        )
    return found == script.get_current_head()


def migrate(conn: Connection, version: str = "head") -> None:
    """Migrates to the newest version, or to another one. All of it happens in the transaction of the connection, or
    nothing."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = conn
    command.upgrade(config, version)
