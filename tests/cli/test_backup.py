"""A backup is restored into a newer version, and models in training go on at the same bits."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from palestra.cli import main
from palestra.store import Store
from palestra.store.queries.settings import get_setting, put_setting
from tests.server.conftest import Server
from tests.server.raw import Model, Raw, datum
from tests.store.conftest import DATABASES, new_database, postgres_server

__all__ = ["postgres_server"]


@pytest.fixture(params=DATABASES)
def databases(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Flags for the server that is backed up, and for the one that is restored."""
    if request.param == "sqlite":
        yield [], []
        return
    with new_database("postgresql", tmp_path, request) as old, new_database("postgresql", tmp_path, request) as new:
        yield ["--database", old], ["--database", new]


def palestra(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1, result.output
    return result.output


@pytest.mark.slow
def test_a_server_restored_from_a_backup_goes_on_where_it_was(
    databases: tuple[list[str], list[str]], tmp_path: Path, micro_model: Path
) -> None:
    before, after = databases
    file, settings = str(tmp_path / "backup.tar"), ["journal=database"] if before else []
    with Server(tmp_path / "old", micro_model, *settings, "session_timeout_s=-1", flags=tuple(before)) as server:
        server.start()
        api = Raw(server)
        trained = api.model(rank=4)
        api.result(trained.send_pass(datum(1), datum(2)))
        api.result(trained.step(1e-2))
        path = trained.save("kept")
        expected = trained.loss(trained.send_pass(datum(5)))
        assert "another server uses" in refused("backup", file, "--state", str(server.state), *before)
        assert server.stop() == 0
        said = palestra("backup", file, "--state", str(server.state), *before)
    assert "backup.tar has " in said
    assert "not in it" not in said
    with Server(tmp_path / "new", micro_model, *settings, "session_timeout_s=-1", flags=tuple(after)) as server:
        palestra("restore", file, "--state", str(server.state), *after)
        assert "restore into a new" in refused("restore", file, "--state", str(server.state), *after)
        server.start()
        api = Raw(server)
        again = Model(api, trained.model_id)
        again.numbers = trained.numbers
        assert again.loss(again.send_pass(datum(5))) == expected
        loaded = api.model(rank=4)
        api.result(loaded.send("load_weights", path=path, optimizer=True))
        assert loaded.loss(loaded.send_pass(datum(5))) == expected
        assert server.stop() == 0


def test_the_backup_of_an_older_version_opens_in_this_one(tmp_path: Path) -> None:
    """Its state folder is one that version 0.1.0 wrote."""
    with tarfile.open(Path(__file__).parents[1] / "fixtures" / "state-0.1.0" / "state.tar.xz") as files:
        files.extractall(tmp_path, filter="data")
    palestra("backup", str(tmp_path / "backup.tar"), "--state", str(tmp_path / "state"))
    palestra("restore", str(tmp_path / "backup.tar"), "--state", str(tmp_path / "restored"))
    assert (tmp_path / "restored" / "palestra.db").stat().st_mode & 0o777 == 0o600
    kept = [{str(f.relative_to(tmp_path / name)) for f in (tmp_path / name).rglob("*") if f.is_file()} for name in
            ("state", "restored")]  # fmt: skip
    left_out = {name for name in kept[0] - kept[1] if not name.startswith(("logs", "palestra.db-"))}
    assert all(name.endswith((".lock", ".ipc", "worker.json")) for name in left_out)
    with Store.open(f"sqlite:///{tmp_path}/restored/palestra.db") as store:  # it is migrated
        assert store.read_now(lambda c: get_setting(c, "server_secret"))


def test_a_backup_that_fails_leaves_nothing(tmp_path: Path) -> None:
    state, file = tmp_path / "state", tmp_path / "backup.tar"
    with Store.open(f"sqlite:///{state}/palestra.db") as store:
        store.write_now(lambda c: put_setting(c, "a", "b"))
        assert "another server uses the database" in refused("backup", str(file), "--state", str(state))
    assert not list(tmp_path.glob("backup*"))
    palestra("backup", str(file), "--state", str(state))
    assert "exists already" in refused("backup", str(file), "--state", str(state))
    (tmp_path / "bad.tar").write_bytes(b"no archive")
    assert "cannot be restored" in refused("restore", str(tmp_path / "bad.tar"), "--state", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_backup_of_nothing_is_refused_and_makes_nothing(tmp_path: Path) -> None:
    file, empty = tmp_path / "backup.tar", tmp_path / "empty"
    assert "there is no state folder" in " ".join(refused("backup", str(file), "--state", str(tmp_path / "no")).split())
    empty.mkdir()
    assert "there is no database" in " ".join(refused("backup", str(file), "--state", str(empty)).split())
    assert not file.exists()
    assert list(empty.iterdir()) == []
