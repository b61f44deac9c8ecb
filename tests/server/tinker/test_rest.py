"""The REST calls by HTTP, in process: pages, forms, bounds, who sees what. No engine: rows and files are made here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.types import Receive, Scope, Send

from palestra.config.serve import ServeConfig
from palestra.server.app import create_app
from palestra.server.core.sessions import TinkerSession as LiveSession
from palestra.server.http.logs import RequestLog
from palestra.server.services import ServerServices
from palestra.store import FileJournal, Store
from palestra.store.queries import checkpoints as checkpoint_rows
from palestra.store.queries import models as model_rows
from palestra.store.queries import samplers as sampler_rows
from palestra.store.queries import sessions as session_rows
from palestra.store.queries.keys import create_key
from palestra.store.records import CheckpointKind, ModelRow, PendingSave, Rights, SamplerRow, SessionRow
from palestra.types import LoraConfig
from tests.waiting import until

BASE = "Qwen/Qwen3-8B"
FILES = {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": b"\x00weights" * 100}


_routes: list[FastAPI] = []


def with_shared_routes(app: RequestLog) -> RequestLog:
    """The same application with the routes of the first one, as they are resolved in a tenth of a second; they find
    the state of the application that was asked. Only the pages below `/ui` keep that of the first: none is asked for
    here."""
    around = app.app.app
    own = around.app
    if not _routes:
        _routes.append(own)

    async def with_own_state(scope: Scope, receive: Receive, send: Send) -> None:
        _routes[0].state = own.state
        await _routes[0](scope, receive, send)

    around.app = with_own_state
    return app


class World:
    """A server without engines, and what the tests put into its store."""

    def __init__(self, folder: Path, portal: BlockingPortal):
        self.config = ServeConfig(state=folder / "state")
        self.config.state.mkdir(parents=True)
        self.store = Store.open(self.config.database)
        self.journals = tuple(
            FileJournal.open(self.config.state / "journal" / name) for name in ("requests", "results")
        )
        self.services = ServerServices(self.config, self.store, self.journals, "a secret")
        self.app, self._portal = with_shared_routes(create_app(self.services)), portal
        self._clock = time.time() - 1000

    def close(self) -> None:
        async def close() -> None:
            for journal in self.journals:
                await journal.close()
            await self.store.close()

        self._portal.call(close)

    def key(self, name: str, right: Rights = Rights.TRAINER, owner: str | None = None) -> str:
        return self.store.write_now(
            lambda c: create_key(c, name=name, owner=owner or name, rights=right, now=time.time())
        ).text

    def client(self, key: str | None = "tml-any") -> TestClient:
        headers = {} if key is None else {"X-API-Key": key}
        client = TestClient(self.app, base_url="http://127.0.0.1:8000", headers=headers, raise_server_exceptions=False)
        client.portal = self._portal
        return client

    def tick(self) -> float:
        self._clock += 1
        return self._clock

    def session(self, session_id: str, owner: str = "local", **fields: Any) -> str:
        now = self.tick()
        row = SessionRow(session_id=session_id, owner=owner, created_at=now, last_heartbeat_at=now, **fields)
        self.store.write_now(lambda c: session_rows.insert_session(c, row))
        self.services.sessions.active[session_id] = LiveSession(session_id, owner)
        return session_id

    def run(self, model_id: str, owner: str = "local", **fields: Any) -> str:
        session_id, now = model_id.partition(":")[0], self.tick()
        if self.store.read_now(lambda c: session_rows.get_session(c, session_id)) is None:
            self.session(session_id, owner)
        row = ModelRow(
            model_id=model_id,
            session_id=session_id,
            owner=owner,
            base_model=BASE,
            lora=LoraConfig(rank=4),
            created_at=now,
            last_request_at=now,
            **fields,
        )
        self.store.write_now(lambda c: model_rows.insert_model(c, row))
        return model_id

    def checkpoint(
        self,
        model_id: str,
        name: str,
        kind: str = "weights",
        owner: str = "local",
        *,
        ttl_s: float | None = None,
        public: bool = False,
        files: dict[str, bytes] = FILES,
        **fields: Any,
    ) -> str:
        """Of the session's model, with files; returns its path."""
        now = self.tick()
        folder = self.config.checkpoint_folder / model_id.replace(":", "_") / kind / f"{name}@{now}"
        for file, content in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        save = PendingSave(
            request_id=f"{model_id}/{kind}/{name}/{now}",
            model_id=model_id,
            kind=CheckpointKind(kind),
            name=name,
            seq_id=int(now),
            folder=str(folder),
            created_at=now,
            ttl_s=ttl_s,
            **fields,
        )
        self.store.write_now(
            lambda c: (
                checkpoint_rows.begin_checkpoint(
                    c, save, owner=owner, base_model=BASE, lora=LoraConfig(rank=4), overwrite=True
                ),
                checkpoint_rows.complete_checkpoint(
                    c, save.request_id, size_bytes=sum(map(len, files.values())), now=time.time()
                ),
                public and checkpoint_rows.publish_checkpoint(c, save.key, public=True),
            )
        )
        return save.key.path


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    """The event loop of all servers."""
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture
def world(tmp_path: Path, portal: BlockingPortal) -> Iterator[World]:
    world = World(tmp_path, portal)
    yield world
    world.close()


@pytest.fixture
def api(world: World) -> TestClient:
    return world.client()


@pytest.fixture(scope="module")
def empty_api(tmp_path_factory: pytest.TempPathFactory, portal: BlockingPortal) -> Iterator[TestClient]:
    """Of a server without anything, for requests that are refused."""
    world = World(tmp_path_factory.mktemp("empty"), portal)
    yield world.client()
    world.close()


def url_of(path: str) -> str:
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    return f"/api/v1/training_runs/{run}/checkpoints/{checkpoint}"


# Training runs


def test_training_runs_come_in_pages_newest_first(world, api):
    ids = [world.run(f"s{i}:train:0") for i in range(5)][::-1]
    page = api.get("/api/v1/training_runs", params={"limit": 2, "offset": 1}).json()
    assert [run["training_run_id"] for run in page["training_runs"]] == ids[1:3]
    assert page["cursor"] == {"offset": 1, "limit": 2, "total_count": 5}
    beyond = api.get("/api/v1/training_runs", params={"offset": 50}).json()
    assert beyond == {"training_runs": [], "cursor": {"offset": 50, "limit": 20, "total_count": 5}}


def test_a_run_tells_its_last_checkpoints_and_metadata(world, api):
    run = world.run("s:train:0", user_metadata={"renderer_name": "qwen3", "steps": 7})
    world.checkpoint(run, "000001")
    last = world.checkpoint(run, "000002", user_metadata={"a": "b"})
    sampler = world.checkpoint(run, "000002", "sampler_weights")
    world.checkpoint(run, "export", "external_weights")
    found = api.get(f"/api/v1/training_runs/{run}").json()
    assert (found["base_model"], found["is_lora"], found["lora_rank"]) == (BASE, True, 4)
    assert (found["model_owner"], found["corrupted"]) == ("local", False)
    assert found["user_metadata"] == {"renderer_name": "qwen3", "steps": "7"}
    assert found["last_checkpoint"]["tinker_path"] == last
    assert found["last_checkpoint"]["checkpoint_id"] == "weights/000002"
    assert found["last_checkpoint"]["user_metadata"] == {"a": "b"}
    assert found["last_sampler_checkpoint"]["tinker_path"] == sampler
    assert found["last_sampler_checkpoint"]["checkpoint_type"] == "sampler"
    assert datetime.fromisoformat(found["last_request_time"]).tzinfo is not None


def test_runs_of_one_project(world, api):
    world.session("a", project_id="math")
    world.run("a:train:0")
    world.run("b:train:0")
    page = api.get("/api/v1/training_runs", params={"project_id": "math"}).json()
    assert [run["training_run_id"] for run in page["training_runs"]] == ["a:train:0"]


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "offset=-1", "offset=9223372036854775808", "access_scope=all"]
)
@pytest.mark.parametrize("route", ["training_runs", "sessions"])
def test_a_wrong_page_is_400_with_one_line(empty_api, route, query):
    answer = empty_api.get(f"/api/v1/{route}?{query}")
    assert answer.status_code == 400
    detail = answer.json()["detail"]
    assert query.partition("=")[0] in detail
    assert "\n" not in detail


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "training_runs/a b"),
        ("GET", "training_runs/%00"),
        ("GET", "training_runs/" + "x" * 129),
        ("GET", "training_runs/a%20b/checkpoints"),
        ("DELETE", "training_runs/s:train:0/checkpoints/models/x"),
        ("DELETE", "training_runs/s:train:0/checkpoints/weights/a%20b"),
        ("POST", "training_runs/s:train:0/checkpoints/weights/%00/publish"),
        ("DELETE", "training_runs/s:train:0/checkpoints/archive/x/publish"),
        ("GET", "training_runs/s:train:0/checkpoints/nothing/x/external_weights_urls"),
        ("GET", "training_runs/s:train:0/checkpoints/weights/x/external_weights_urls"),
        ("GET", "sessions/a:b"),
        ("GET", "sessions/%00"),
        ("GET", "sessions/" + "x" * 65),
    ],
)
def test_a_wrong_name_is_400_with_one_line(empty_api, method, path):
    answer = empty_api.request(method, f"/api/v1/{path}")
    assert answer.status_code == 400
    assert "\n" not in answer.json()["detail"]


# Checkpoints


def test_checkpoints_of_all_runs_come_in_pages(world, api):
    run, other = world.run("a:train:0"), world.run("b:train:0")
    paths = [world.checkpoint(run, "1"), world.checkpoint(other, "2"), world.checkpoint(run, "3", "sampler_weights")]
    pages = [api.get("/api/v1/checkpoints", params={"limit": 2, "offset": n}).json() for n in (0, 2)]
    assert [c["tinker_path"] for page in pages for c in page["checkpoints"]] == paths[::-1]
    assert pages[0]["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
    of_run = api.get(f"/api/v1/training_runs/{run}/checkpoints").json()
    assert [c["tinker_path"] for c in of_run["checkpoints"]] == [paths[2], paths[0]]
    first = of_run["checkpoints"][1]
    assert (first["checkpoint_type"], first["public"], first["size_bytes"]) == ("training", False, 808)
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert "expires_at" not in first


def test_a_deleted_checkpoint_is_gone_at_once(world, api):
    path = world.checkpoint(world.run("s:train:0"), "x")
    assert api.delete(url_of(path)).status_code == 204
    assert api.delete(url_of(path)).status_code == 404
    assert api.get("/api/v1/checkpoints").json()["checkpoints"] == []
    assert api.post("/api/v1/weights_info", json={"tinker_path": path}).status_code == 404


def test_a_ttl_is_set_and_taken_back(world, api):
    path = world.checkpoint(world.run("s:train:0"), "x")
    assert api.put(url_of(path) + "/ttl", json={"ttl_seconds": 7200}).status_code == 204
    (found,) = api.get("/api/v1/checkpoints").json()["checkpoints"]
    left = datetime.fromisoformat(found["expires_at"]) - datetime.now(UTC)
    assert timedelta(seconds=7100) < left <= timedelta(seconds=7200)
    assert api.put(url_of(path) + "/ttl", json={"ttl_seconds": None}).status_code == 204
    assert "expires_at" not in api.get("/api/v1/checkpoints").json()["checkpoints"][0]
    for wrong in ({"ttl_seconds": 0}, {"ttl_seconds": -1}, {"ttl_seconds": 1 << 40}, {"ttl_seconds": "1"}, {}):
        assert api.put(url_of(path) + "/ttl", json=wrong).status_code == 400


def test_an_expired_checkpoint_is_not_listed_even_before_it_is_swept(world, api):
    run = world.run("s:train:0")
    kept, expired = world.checkpoint(run, "kept"), world.checkpoint(run, "expired", ttl_s=-1)
    assert [c["tinker_path"] for c in api.get("/api/v1/checkpoints").json()["checkpoints"]] == [kept]
    assert api.get(f"/api/v1/training_runs/{run}").json()["last_checkpoint"]["tinker_path"] == kept
    assert api.post(url_of(expired) + "/publish").status_code == 404


def test_publishing_twice_is_no_error(world, api):
    path = world.checkpoint(world.run("s:train:0"), "x")
    for _ in range(2):
        assert api.post(url_of(path) + "/publish").status_code == 204
        assert api.get("/api/v1/checkpoints").json()["checkpoints"][0]["public"] is True
    for _ in range(2):
        assert api.delete(url_of(path) + "/publish").status_code == 204
        assert api.get("/api/v1/checkpoints").json()["checkpoints"][0]["public"] is False


# Files


def urls_of(api: TestClient, path: str) -> dict[str, str]:
    answer = api.get(url_of(path) + "/external_weights_urls")
    assert answer.status_code == 200, answer.text
    return answer.json()["urls"]


def test_files_are_fetched_without_a_key(world, api):
    path = world.checkpoint(world.run("s:train:0"), "x", "external_weights", files={**FILES, "sub dir/ü.bin": b"more"})
    answer = api.get(url_of(path) + "/external_weights_urls").json()
    left = datetime.fromisoformat(answer["expires"]) - datetime.now(UTC)
    assert timedelta(minutes=55) < left <= timedelta(hours=1)
    nobody = world.client(key=None)
    for name, content in {**FILES, "sub dir/ü.bin": b"more"}.items():
        got = nobody.get(answer["urls"][name])
        assert (got.status_code, got.content) == (200, content)
        assert got.headers["content-type"] == "application/octet-stream"
        assert nobody.head(answer["urls"][name]).headers["content-length"] == str(len(content))
    part = nobody.get(answer["urls"]["adapter_model.safetensors"], headers={"Range": "bytes=1-7"})
    assert (part.status_code, part.content) == (206, b"weights")
    assert set(answer["urls"]) == {*FILES, "sub dir/ü.bin"}


def test_a_changed_url_opens_nothing(world, api):
    run = world.run("s:train:0")
    path = world.checkpoint(run, "x", "external_weights")
    world.checkpoint(run, "y", "external_weights")
    url = urls_of(api, path)["adapter_config.json"]
    changes: list[Callable[[str], str]] = [
        lambda u: u.replace("adapter_config.json", "adapter_model.safetensors"),
        lambda u: u.replace("external_weights/x", "external_weights/y"),
        lambda u: u.replace("external_weights/x", "weights/x"),
        lambda u: u.replace("s:train:0", "t:train:0"),
        lambda u: u.replace("expires=", "expires=9"),
        lambda u: u.replace("version=", "version=0"),
        lambda u: u[:-1] + ("0" if u[-1] != "0" else "1"),
        lambda u: u.partition("signature=")[0] + "signature=%C3%BC",
        lambda u: u.partition("?")[0],
        lambda u: u.replace("files/adapter_config.json", "files/..%2F..%2F..%2Fpalestra.db"),
        lambda u: u.replace("files/adapter_config.json", "files/%2Fetc%2Fpasswd"),
    ]
    nobody = world.client(key=None)
    for change in changes:
        assert change(url) != url
        assert nobody.get(change(url)).status_code == 403, change(url)
    assert nobody.get(url).status_code == 200


def test_urls_end_with_time_replacement_and_deletion(world, api, monkeypatch):
    run = world.run("s:train:0")
    path = world.checkpoint(run, "x", "external_weights")
    old = urls_of(api, path)["adapter_config.json"]
    world.checkpoint(run, "x", "external_weights", files={"adapter_config.json": b"new"})
    assert api.get(old).status_code == 404
    new = urls_of(api, path)["adapter_config.json"]
    assert api.get(new).content == b"new"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    assert api.get(new).status_code == 403
    assert "expired" in api.get(new).json()["detail"]
    monkeypatch.undo()
    api.delete(url_of(path))
    assert api.get(new).status_code == 404


def test_urls_do_not_outlive_the_checkpoint(world, api):
    path = world.checkpoint(world.run("s:train:0"), "x", "external_weights", ttl_s=100)
    expires = api.get(url_of(path) + "/external_weights_urls").json()["expires"]
    assert datetime.fromisoformat(expires) - datetime.now(UTC) <= timedelta(seconds=100)


def test_a_link_in_a_folder_is_not_followed(world, api, tmp_path):
    (tmp_path / "secret").write_text("secret")
    path = world.checkpoint(world.run("s:train:0"), "x", "external_weights")
    folder = next((world.config.checkpoints / "s_train_0" / "external_weights").iterdir())
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "dir").symlink_to(tmp_path)
    assert set(urls_of(api, path)) == set(FILES)


# Copies


def copied(api: TestClient, path: str, key: str | None = None, **to: Any) -> str:
    headers = {"X-Idempotency-Key": key} if key else {}
    body = {"source_path": path, **(to or {"destination_project_id": "archive"})}
    answer = api.post("/api/v1/copy_weights", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["tinker_path"]


def test_a_copy_stands_on_its_own(world, api):
    source = world.checkpoint(
        world.run("s:train:0", user_metadata={"renderer_name": "qwen3"}), "x", "external_weights", ttl_s=5000
    )
    copy = copied(api, source)
    assert copy.endswith("/external_weights/x")
    run = copy.removeprefix("tinker://").partition("/")[0]
    found = api.get(f"/api/v1/training_runs/{run}").json()
    assert found["user_metadata"] == {"renderer_name": "qwen3"}
    runs = api.get("/api/v1/training_runs", params={"project_id": "archive"}).json()["training_runs"]
    assert [r["training_run_id"] for r in runs] == [run]
    api.delete(url_of(source))
    for folder in (world.config.checkpoints / "s_train_0" / "external_weights").iterdir():
        for file in folder.iterdir():
            file.unlink()
    assert {name: api.get(url).content for name, url in urls_of(api, copy).items()} == FILES
    info = api.post("/api/v1/weights_info", json={"tinker_path": copy}).json()
    assert (info["base_model"], info["lora_rank"]) == (BASE, 4)
    (listed,) = api.get("/api/v1/checkpoints").json()["checkpoints"]
    assert "expires_at" not in listed


def test_a_copy_that_is_asked_for_again_is_made_once(world, api):
    source = world.checkpoint(world.run("s:train:0"), "x")
    assert copied(api, source, "key-1") == copied(api, source, "key-1")
    assert copied(api, source, "key-2") != copied(api, source, "key-1")
    assert copied(api, source) != copied(api, source)
    assert len(api.get("/api/v1/checkpoints").json()["checkpoints"]) == 5
    folders = [f for f in world.config.checkpoints.glob("*/weights/*") if f.is_dir()]
    assert len(folders) == 5


def test_a_copy_into_a_place_of_a_session(world, api):
    source = world.checkpoint(world.run("s:train:0"), "x")
    place = {"session_id": "s", "model_seq_id": 1}
    assert copied(api, source, **place) == "tinker://s:train:1/weights/x"
    assert copied(api, source, **place) == "tinker://s:train:1/weights/x"
    other = world.checkpoint("s:train:0", "y")
    for taken in ({"session_id": "s", "model_seq_id": 1}, {"session_id": "s", "model_seq_id": 0}):
        answer = api.post("/api/v1/copy_weights", json={"source_path": other, **taken})
        assert (answer.status_code, "already exists" in answer.json()["detail"]) == (400, True)
    assert len(list(world.config.checkpoints.glob("s_train_1/weights/*"))) == 1


def test_a_copy_of_nothing_leaves_nothing(world, api):
    world.run("s:train:0")
    gone = world.checkpoint("s:train:0", "gone", files={})
    for path in ("tinker://s:train:0/weights/none", gone):
        body = {"source_path": path, "destination_project_id": "p"}
        assert api.post("/api/v1/copy_weights", json=body).status_code == 404
    assert api.get("/api/v1/training_runs").json()["cursor"]["total_count"] == 1
    assert not list(world.config.checkpoints.glob("*/*/*copy*"))
    assert api.post("/api/v1/copy_weights", json={"source_path": gone}).status_code == 400


# Sessions


def test_sessions_are_listed_and_shown(world, api):
    world.session("a", user_metadata={"who": "me", "n": 1}, display_name="first")
    world.session("b")
    world.run("a:train:0")
    sampler = SamplerRow(sampler_id="a:sample:0", session_id="a", owner="local", base_model=BASE, created_at=1.0)
    world.store.write_now(lambda c: sampler_rows.insert_sampler(c, sampler))
    assert api.get("/api/v1/sessions").json() == {"sessions": ["b", "a"]}
    assert api.get("/api/v1/sessions", params={"limit": 1, "offset": 1}).json() == {"sessions": ["a"]}
    assert api.get("/api/v1/sessions/a").json() == {
        "training_run_ids": ["a:train:0"],
        "sampler_ids": ["a:sample:0"],
        "user_metadata": {"who": "me", "n": "1"},
        "display_name": "first",
    }
    assert api.get("/api/v1/sessions/c").status_code == 404


def test_search_by_name_metadata_status_and_project(world, api):
    world.session("a", user_metadata={"who": "me"}, display_name="Math run 1")
    world.session("b", project_id="p")
    world.checkpoint(world.run("a:train:0"), "x")
    assert api.put("/api/v1/sessions/a/project", json={"project_id": "q"}).status_code == 204
    api.post("/api/v1/sessions/b/finish", json={"reason": {"type": "errored"}, "detail": "oh"})

    def search(**body: Any) -> list[str]:
        answer = api.post("/api/v1/sessions/search", json=body)
        assert answer.status_code == 200, answer.text
        return [s["session_id"] for s in answer.json()["sessions"]]

    assert search() == ["b", "a"]
    assert search(display_name="RUN math") == ["a"]
    assert search(user_metadata={"who": "me"}) == ["a"]
    assert search(user_metadata={"who": "you"}) == []
    assert search(project_ids=["q"]) == ["a"]
    assert search(statuses=[{"type": "active"}]) == ["a"]
    assert search(statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == ["b"]
    assert search(statuses=[{"type": "client_finished", "reasons": ["success"]}, {"type": "failed"}]) == []
    assert search(statuses=[{"type": "failed"}]) == []
    assert search(owner={"type": "accessible"}) == ["b", "a"]
    assert search(owner={"type": "user", "owner_urns": ["local"]}) == ["b", "a"]
    assert search(owner={"type": "user", "owner_urns": ["other"]}) == []
    finished, active = api.post("/api/v1/sessions/search", json={}).json()["sessions"]
    assert finished["status"] == {"type": "client_finished", "reason": {"type": "errored"}, "detail": "oh"}
    assert active["status"] == {"type": "active"}
    assert (active["checkpoints_count"], active["checkpoint_storage_bytes"], active["project_id"]) == (1, 808, "q")


def test_search_pages_end_where_the_next_begin(world, api):
    ids = [world.session(f"s{n}") for n in range(5)][::-1]
    found, cursor = [], None
    for _ in range(3):
        body = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = api.post("/api/v1/sessions/search", json=body).json()
        found += [s["session_id"] for s in page["sessions"]]
        cursor = page.get("next_cursor")
    assert (found, cursor) == (ids, None)


def test_a_trace_is_refused_with_a_reason(world, api):
    world.session("a")
    answer = api.get("/api/v1/sessions/a/trace_export").json()
    assert answer["status"] == "failed"
    assert "no traces" in answer["error"]


# Owners and keys


@pytest.fixture
def two(world: World) -> tuple[TestClient, TestClient]:
    return world.client(world.key("alice")), world.client(world.key("bob"))


def test_another_owner_finds_nothing(world, two):
    alice, bob = two
    world.session("s", "alice", display_name="mine")
    run = world.run("s:train:0", "alice")
    paths = [world.checkpoint(run, "x", kind, "alice") for kind in CheckpointKind]
    assert len(alice.get("/api/v1/checkpoints").json()["checkpoints"]) == 3
    for query in ("", "?access_scope=accessible"):
        assert bob.get(f"/api/v1/training_runs{query}").json()["training_runs"] == []
        assert bob.get(f"/api/v1/training_runs/{run}{query}").status_code == 404
        assert bob.get(f"/api/v1/sessions{query}").json() == {"sessions": []}
        assert bob.get(f"/api/v1/sessions/s{query}").status_code == 404
    assert bob.get("/api/v1/checkpoints").json()["checkpoints"] == []
    assert bob.get(f"/api/v1/training_runs/{run}/checkpoints").status_code == 404
    for path in paths:
        assert bob.delete(url_of(path)).status_code == 404
        assert bob.post(url_of(path) + "/publish").status_code == 404
        assert bob.delete(url_of(path) + "/publish").status_code == 404
        assert bob.put(url_of(path) + "/ttl", json={"ttl_seconds": 1}).status_code == 404
        body = {"source_path": path, "destination_project_id": "p"}
        assert bob.post("/api/v1/copy_weights", json=body).status_code == 404
    assert bob.get(url_of(paths[2]) + "/external_weights_urls").status_code == 404
    assert bob.put("/api/v1/sessions/s/project", json={"project_id": "p"}).status_code == 404
    assert bob.get("/api/v1/sessions/s/trace_export").status_code == 404
    for body in ({}, {"owner": {"type": "accessible"}}, {"owner": {"type": "user", "owner_urns": ["alice"]}}):
        assert bob.post("/api/v1/sessions/search", json=body).json()["sessions"] == []
    own = world.checkpoint(world.run("b:train:0", "bob"), "y", owner="bob")
    into = {"source_path": own, "session_id": "s", "model_seq_id": 5}
    assert bob.post("/api/v1/copy_weights", json=into).status_code == 404
    # The answer for what is another's and for what is not there differ in the name alone.
    there, nowhere = bob.get("/api/v1/sessions/s"), bob.get("/api/v1/sessions/t")
    assert there.json()["detail"].replace(": s", ": t") == nowhere.json()["detail"]
    assert len(alice.get("/api/v1/checkpoints").json()["checkpoints"]) == 3


def test_what_is_published_can_be_used_but_not_changed(world, two):
    alice, bob = two
    run = world.run("s:train:0", "alice")
    world.checkpoint(run, "private", owner="alice")
    path = world.checkpoint(run, "shown", owner="alice", public=True)
    world.checkpoint(run, "later", owner="alice")
    expired = world.run("t:train:0", "alice")
    world.checkpoint(expired, "x", owner="alice", public=True, ttl_s=-1)
    assert bob.get("/api/v1/training_runs").json()["training_runs"] == []
    assert bob.get(f"/api/v1/training_runs/{run}").status_code == 404
    page = bob.get("/api/v1/training_runs?access_scope=accessible").json()
    assert page["cursor"]["total_count"] == 1
    (found,) = page["training_runs"]
    assert (found["training_run_id"], found["last_checkpoint"]["tinker_path"]) == (run, path)
    assert bob.get(f"/api/v1/training_runs/{run}?access_scope=accessible").json() == found
    assert bob.post("/api/v1/weights_info", json={"tinker_path": path}).status_code == 200
    for attempt in (
        bob.delete(url_of(path)),
        bob.delete(url_of(path) + "/publish"),
        bob.put(url_of(path) + "/ttl", json={"ttl_seconds": 1}),
        bob.get(f"/api/v1/training_runs/{run}/checkpoints"),
    ):
        assert attempt.status_code == 404
    copy = copied(bob, path)
    assert [c["tinker_path"] for c in bob.get("/api/v1/checkpoints").json()["checkpoints"]] == [copy]
    assert bob.get("/api/v1/checkpoints").json()["checkpoints"][0]["public"] is False
    assert alice.delete(url_of(path) + "/publish").status_code == 204
    assert bob.post("/api/v1/weights_info", json={"tinker_path": path}).status_code == 404
    assert bob.post("/api/v1/weights_info", json={"tinker_path": copy}).status_code == 200
    assert copied(bob, copy, "k") == copied(bob, copy, "k")


def test_without_a_valid_key_nothing_but_signed_urls_answers(world, two):
    alice, _ = two
    path = world.checkpoint(world.run("s:train:0", "alice"), "x", "external_weights", "alice")
    url = urls_of(alice, path)["adapter_config.json"]
    for nobody in (world.client(None), world.client("tml-wrong")):
        for route in ("training_runs", "checkpoints", "sessions", "auth/apikey/me", "audit", "billing/usage/events"):
            assert nobody.get(f"/api/v1/{route}").status_code == 401
        assert nobody.delete(url_of(path)).status_code == 401
        assert nobody.get(url).status_code == 200


def test_a_key_knows_itself_and_can_be_revoked(world):
    key = world.key("carol", Rights.EPISODE, owner="team")
    world.key("other")
    carol = world.client(key)
    me = carol.get("/api/v1/auth/apikey/me").json()
    assert (me["key_id"], me["name"], me["note"]) == (1, "carol", "right: episode")
    assert me["details"]["user_details"]["email"] == "team"
    assert carol.get("/api/v1/training_runs").status_code == 403
    assert carol.delete("/api/v1/auth/apikey/me").status_code == 204
    until(lambda: carol.get("/api/v1/auth/apikey/me").status_code == 401)  # the key is remembered for a moment


def test_without_keys_there_is_none_to_revoke(api):
    assert api.get("/api/v1/auth/apikey/me").json()["name"] == "local"
    assert api.delete("/api/v1/auth/apikey/me").status_code == 400


def test_nothing_is_billed(api):
    assert api.get("/api/v1/audit").json() == {"entries": []}
    assert api.get("/api/v1/billing/usage/events").json() == {"data": [], "sessions": {}}
    assert api.get("/api/v1/billing/usage/checkpoints/current").json() == {"data": []}
