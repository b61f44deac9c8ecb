"""The same promises with PostgreSQL under the broker: a server that is killed, and a database that goes away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, make_url, text

from tests.server.episodes import test_faults as faults
from tests.server.episodes.conftest import Api, group, player, ref, say, whole
from tests.server.model_api.conftest import Ephebe, ephebe_in
from tests.store.conftest import new_database, postgres_server

__all__ = ["postgres_server"]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    with new_database("postgresql", tmp_path_factory.mktemp("unused"), request) as url:
        yield url


@pytest.fixture(scope="module")
def frail(tmp_path_factory: pytest.TempPathFactory, database: str) -> Iterator[Ephebe]:
    server = ephebe_in(tmp_path_factory.mktemp("frail"), "episodes.hold_calls_s=0.1", database=database)
    with server:
        yield server


@pytest.mark.slow
def test_a_server_killed_between_any_two_steps_goes_on_as_if_nothing_was(api: Api) -> None:
    faults.test_a_server_killed_between_any_two_steps_goes_on_as_if_nothing_was(api, "all")


@pytest.mark.slow
def test_a_call_and_a_claim_that_a_kill_interrupts_can_be_made_again(api: Api) -> None:
    faults.test_a_call_and_a_claim_that_a_kill_interrupts_can_be_made_again(api)


@pytest.mark.slow
def test_a_database_that_goes_away_refuses_and_forgets_nothing(api: Api, database: str) -> None:
    api.register(size=2)
    (lease,) = api.claim("before")
    tell(database, "ALTER DATABASE {name} SET default_transaction_read_only = on")
    refused = [
        api.send("POST", f"runs/{api.run}/groups", {"groups": [group("more")]}),
        api.send("POST", "claim", {"client_id": "player", "claim_id": "away", "run": api.run}),
        api.send("POST", "end", {"client_id": "player", "ends": [ref(lease) | {"result": {"reward": 1.0}}]}),
    ]
    tell(database, "ALTER DATABASE {name} RESET default_transaction_read_only")
    for answer in refused:
        assert (answer.status_code, float(answer.headers["retry-after"]) > 0) == (503, True), answer.text
    api.server.until(lambda: api.send("POST", f"runs/{api.run}/groups", {"groups": []}).status_code == 200)
    info = api.info()
    assert (info["queued"], info["leased"], info["ended"]) == (1, 1, 0)
    assert api.claim("before")[0]["api_key"] == lease["api_key"]
    with player(lease) as client:
        answer = say(client, faults.HI)
    (other,) = api.claim("away")
    assert other["attempt"] == 1
    assert [api.end(one)["status"] for one in (lease, other)] == ["accepted", "accepted"]
    assert api.register("more")
    groups = api.played()
    assert [line["tokens"] for line in groups[0]["episodes"][0]["trajectories"]] == [whole(answer)]
    assert api.of_run("commit", cursor=1)["committed"] == 1
    tell(database)  # and once more, with nothing changed: it is there again at once
    api.server.until(lambda: api.send("POST", f"runs/{api.run}/groups", {"groups": [group("last")]}).status_code == 200)
    leases = api.claim("last", max_n=2)
    api.server.restart()
    assert [one["api_key"] for one in api.claim("last", max_n=2)] == [one["api_key"] for one in leases]
    assert [api.end(one)["status"] for one in (lease, *leases)] == ["repeated", "accepted", "accepted"]


def tell(database: str, change: str = "") -> None:
    """A setting of the database, where there is a change; then every connection to it is cut."""
    url = make_url(database)
    engine = create_engine(url.set(drivername="postgresql+psycopg", database="postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as conn:
        if change:
            conn.execute(text(change.format(name=url.database)))
        cut = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name")
        conn.execute(cut, {"name": url.database})
    engine.dispose()
