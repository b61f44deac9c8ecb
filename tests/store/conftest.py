"""Every database test runs on SQLite and on PostgreSQL.

PostgreSQL: the server of PALESTRA_TEST_POSTGRES (a URL whose user may create databases), or a throw-away one where its
programs are installed, or skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, make_url, text

from palestra.store import Store
from palestra.store.tables import metadata
from palestra.util.programs import missing

DATABASES = ["sqlite", "postgresql"]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    if url := os.environ.get("PALESTRA_TEST_POSTGRES"):
        yield url.replace("postgres://", "postgresql://", 1)
        return
    programs = _postgres_programs()
    if programs is None:
        pytest.skip(f"{missing('postgres')}, and PALESTRA_TEST_POSTGRES is not set")
    folder = Path(tempfile.mkdtemp(prefix="palestra-pg-"))
    user = None
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        user = "nobody"
        shutil.chown(folder, user)
    try:
        _run([programs / "initdb", "-D", folder / "data", "-U", "palestra", "-A", "trust", "-N"], user)
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        _run([programs / "pg_ctl", "-D", folder / "data", "-l", folder / "log", "-o", options, "-w", "start"], user)
        try:
            yield f"postgresql://palestra@/postgres?host={folder}"
        finally:
            _run([programs / "pg_ctl", "-D", folder / "data", "-m", "immediate", "stop"], user)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _postgres_programs() -> Path | None:
    found = [*sorted(Path("/usr/lib/postgresql").glob("*/bin")), *Path("/usr/local/pgsql").glob("bin")]
    if binary := shutil.which("postgres"):
        found.append(Path(binary).resolve().parent)
    return next((folder for folder in reversed(found) if (folder / "initdb").exists()), None)


def _run(command: list[str | Path], user: str | None) -> None:
    # No pipes for output: the server that pg_ctl starts would keep them open.
    null = subprocess.DEVNULL
    if subprocess.run(command, check=False, stdout=null, stderr=null, user=user, cwd="/", timeout=60).returncode:
        pytest.skip(f"PostgreSQL does not start here: {' '.join(map(str, command))}")


@contextmanager
def new_database(kind: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{folder}/folder/palestra.db"
        return
    server = make_url(request.getfixturevalue("postgres_server")).set(drivername="postgresql+psycopg")
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    name = f"test_{uuid.uuid4().hex}"
    with engine.connect() as conn:
        conn.execute(text(f"CREATE DATABASE {name}"))
    yield server.set(database=name, drivername="postgresql").render_as_string(hide_password=False)
    with engine.connect() as conn:
        conn.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    engine.dispose()


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A new, empty database."""
    with new_database(request.param, tmp_path, request) as url:
        yield url


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """Of this test alone."""
    with Store.open(database_url) as store:
        yield store


@pytest.fixture(scope="session", params=DATABASES)
def opened_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with new_database(request.param, tmp_path_factory.mktemp("store"), request) as url, Store.open(url) as store:
        yield store


@pytest.fixture
def tables_store(opened_store: Store) -> Store:
    """With empty tables: opened once for all tests of queries."""

    def clear(conn: Connection) -> None:
        for table in reversed(metadata.sorted_tables):
            conn.execute(table.delete())

    opened_store.write_now(clear)
    return opened_store
