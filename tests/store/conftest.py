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
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from palestra.store import Store


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    if url := os.environ.get("PALESTRA_TEST_POSTGRES"):
        yield url.replace("postgres://", "postgresql://", 1)
        return
    programs = _postgres_programs()
    if programs is None:
        pytest.skip("no PostgreSQL: set PALESTRA_TEST_POSTGRES or install it")
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
    # Output to files: the server started by pg_ctl would keep a pipe open.
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=user, cwd="/", timeout=60)
    if done.returncode:
        pytest.skip(f"PostgreSQL does not start here: {' '.join(map(str, command))}")


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A new, empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/folder/palestra.db"
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


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store.open(database_url) as store:
        yield store
