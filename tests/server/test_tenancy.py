"""Who may what: a tenant finds nothing of another's, by no call, and learns not even that it exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import httpx
import pytest
from click.testing import CliRunner

from tests.server.raw import NAME, PROTOBUF, Model, Raw, datum, ok, refused, text, wire
from tests.waiting import until

GHOST = "f0" * 16
"""A session that never was."""
DONE = {"type": "success"}
MakeServer = Callable[..., Any]


@dataclass
class World:
    """Alice has one of everything; Bob has a model of his own and wants hers."""

    server: Any
    alice: Raw
    bob: Raw
    hers: Model
    his: Model
    sample_request: str
    keys: dict[str, str]


@pytest.fixture(scope="module")
def world(make_module_server: MakeServer) -> World:
    server = make_module_server(start=False, log_level="debug")
    keys = {name: server.make_key(name, right=right) for name, right in RIGHTS.items()}
    server.start()
    alice, bob = Raw(server, keys["alice"]), Raw(server, keys["bob"])
    hers, his = alice.model(), bob.model()
    hers.works()
    hers.save("ck")
    alice.result(hers.send("save_weights_for_sampler", path="samp"))
    alice.result(hers.send("save_weights_external", path="ext"))
    alice.result(hers.keep(0))
    sampled = ok(alice.sample(f"{hers.session_id}:sample:0"))
    alice.result(sampled)
    return World(server, alice, bob, hers, his, sampled["request_id"], keys)


RIGHTS = {
    "alice": "trainer",
    "bob": "trainer",
    "carol": "admin",
    "a worker": "worker",
    "an episode": "episode",
    "prometheus": "metrics",
}

# Every call that names something. `s` is Alice's session, or one that never was.

Call = Callable[[World, Raw, str], httpx.Response]


def path(s: str, kind: str = "weights/ck") -> str:
    return f"tinker://{s}:train:0/{kind}"


def rest(method: str, what: str, **body: Any) -> Call:
    def call(_: World, api: Raw, s: str) -> httpx.Response:
        return api.http.request(method, f"/api/v1/{what.format(s=s)}", json=body or None)

    return call


def post(what: str, **body: Any) -> Call:
    def filled(value: Any, s: str) -> Any:
        return value.replace("{s}", s) if isinstance(value, str) else value

    return lambda _, api, s: api.post(what.format(s=s), **{k: filled(v, s) for k, v in body.items()})


def into_his(what: str, **body: Any) -> Call:
    """A call on Bob's own model or session that names something of Alice's."""

    def call(world: World, api: Raw, s: str) -> httpx.Response:
        response: dict[str, Any] = {k: v.replace("{s}", s) if isinstance(v, str) else v for k, v in body.items()}
        if what == "load_weights" and "model_seq_id" not in response:
            return world.his.send(what, **response)
        return api.post(what, session_id=world.his.session_id, **response)

    return call


def a_pass(_: World, api: Raw, s: str) -> httpx.Response:
    message = wire.ForwardBackwardRequest(model_id=f"{s}:train:0", seq_id=90, data=[datum()], loss_fn="cross_entropy")
    return api.http.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=PROTOBUF)


def sample_result(world: World, api: Raw, s: str) -> httpx.Response:
    return api.retrieve(world.sample_request.replace(world.hers.session_id, s))


MODEL = {"model_id": "{s}:train:0", "seq_id": 90}
JSON_PASS = {
    "loss_fn": "cross_entropy",
    "data": [{"model_input": text(5), "loss_fn_inputs": {"target_tokens": {"data": [6], "dtype": "int64"}}}],
}
SAMPLE = {"prompt": text(5), "sampling_params": {"max_tokens": 1}}
CHECKPOINT = "training_runs/{s}:train:0/checkpoints/weights/ck"

CALLS: dict[str, Call] = {
    "heartbeat": post("session_heartbeat", session_id="{s}"),
    "finish": post("sessions/{s}/finish", reason=DONE),
    "create a model in it": post("create_model", session_id="{s}", model_seq_id=9, base_model=NAME),
    "create a sampler in it": post(
        "create_sampling_session", session_id="{s}", sampling_session_seq_id=9, base_model=NAME
    ),
    "sample its checkpoint": into_his("create_sampling_session", sampling_session_seq_id=9, model_path=path("{s}")),
    "sample its sampler checkpoint": into_his(
        "create_sampling_session", sampling_session_seq_id=9, model_path=path("{s}", "sampler_weights/samp")
    ),
    "get_info": post("get_info", model_id="{s}:train:0"),
    "unload": post("unload_model", model_id="{s}:train:0"),
    "forward_backward": a_pass,
    "forward_backward in JSON": post("forward_backward", **MODEL, forward_backward_input=JSON_PASS),
    "forward": post("forward", **MODEL, forward_input=JSON_PASS),
    "optim_step": post("optim_step", **MODEL, adam_params={}),
    "save": post("save_weights", **MODEL, path="mine"),
    "save over it": post("save_weights", **MODEL, path="ck", overwrite=True),
    "save for sampling": post("save_weights_for_sampler", **MODEL, path="mine"),
    "keep a sampler": post("save_weights_for_sampler", **MODEL, sampling_session_seq_id=9),
    "export": post("save_weights_external", **MODEL, path="mine"),
    "load into it": post("load_weights", **MODEL, path=path("{s}"), optimizer=True),
    "load it": into_his("load_weights", path=path("{s}"), optimizer=True),
    "load its sampler weights": into_his("load_weights", path=path("{s}", "sampler_weights/samp"), optimizer=False),
    "load it as new": into_his("load_weights", model_seq_id=9, path=path("{s}"), optimizer=False),
    "weights_info": post("weights_info", tinker_path=path("{s}")),
    "sample": post("asample", sampling_session_id="{s}:sample:0", seq_id=90, **SAMPLE),
    "sample by path": post("asample", model_path=path("{s}"), **SAMPLE),
    "join": post("join_sampling_session", sampling_session_id="{s}:sample:0"),
    "sampler": rest("GET", "samplers/{s}:sample:0"),
    "result of its pass": post("retrieve_future", request_id="train:{s}:train:0:1"),
    "result of its creation": post("retrieve_future", request_id="train:{s}:train:0:0"),
    "result of its sample": sample_result,
    "results of its sampler": lambda _, api, s: api.post(
        "retrieve_futures", target={"sampling_session_id": f"{s}:sample:0"}, timeout=0
    ),
    "run": rest("GET", "training_runs/{s}:train:0"),
    "run, if public": rest("GET", "training_runs/{s}:train:0?access_scope=accessible"),
    "its checkpoints": rest("GET", "training_runs/{s}:train:0/checkpoints"),
    "delete": rest("DELETE", CHECKPOINT),
    "publish": rest("POST", CHECKPOINT + "/publish"),
    "unpublish": rest("DELETE", CHECKPOINT + "/publish"),
    "ttl": rest("PUT", CHECKPOINT + "/ttl", ttl_seconds=3600),
    "download": rest("GET", "training_runs/{s}:train:0/checkpoints/external_weights/ext/external_weights_urls"),
    "session": rest("GET", "sessions/{s}"),
    "project": rest("PUT", "sessions/{s}/project", project_id="mine"),
    "trace": rest("GET", "sessions/{s}/trace_export"),
    "copy it": post("copy_weights", source_path=path("{s}"), destination_project_id="mine"),
    "copy into it": post("copy_weights", source_path=path(GHOST), session_id="{s}", model_seq_id=5),
}
LOST = {"result of its sample"}
"""410 for both: a client whose sample was lost with the server sends it again."""


@pytest.mark.parametrize("name", CALLS)
def test_what_is_anothers_does_not_exist(world: World, name: str) -> None:
    real = CALLS[name](world, world.bob, world.hers.session_id)
    ghost = CALLS[name](world, world.bob, GHOST)
    assert real.status_code == (410 if name in LOST else 404), real.text
    assert real.status_code == ghost.status_code
    assert real.text.replace(world.hers.session_id, GHOST) == ghost.text
    assert "alice" not in real.text


def test_cancelling_anothers_sample_changes_nothing(world: World) -> None:
    said = ok(world.alice.sample(f"{world.hers.session_id}:sample:0", 50, max_tokens=200))
    world.bob.post("cancel_future", request_id=said["request_id"])
    assert len(world.alice.result(said)["sequences"]) == 1


def test_an_upload_is_its_owners(world: World) -> None:
    upload = "5" * 32
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        ok(world.alice.http.put(f"/api/v1/uploads/{upload}/{file}", content=b"hers"))
    shape = {"rank": 4, "alpha": 32.0, "train_attn": True, "train_mlp": True, "train_unembed": False}
    answer = world.bob.post("import_weights", upload_id=upload, base_model=NAME, lora=shape)
    assert answer.status_code == 404, answer.text
    his = world.bob.http.put(f"/api/v1/uploads/{upload}/adapter_config.json", params={"offset": 4}, content=b"x")
    assert (his.status_code, "has 0 bytes" in his.text) == (400, True)


def test_lists_and_searches_show_ones_own_only(world: World) -> None:
    for scope in ("owned", "accessible"):
        runs = ok(world.bob.get(f"training_runs?limit=1000&access_scope={scope}"))["training_runs"]
        assert {run["training_run_id"] for run in runs} == {world.his.model_id}
        sessions = ok(world.bob.get(f"sessions?limit=1000&access_scope={scope}"))["sessions"]
        assert world.hers.session_id not in sessions
    assert ok(world.bob.get("checkpoints"))["checkpoints"] == []
    for owner in ({"type": "own"}, {"type": "accessible"}, {"type": "user", "owner_urns": ["alice"]}):
        found = ok(world.bob.post("sessions/search", owner=owner))["sessions"]
        assert world.hers.session_id not in {session["session_id"] for session in found}
    assert ok(world.bob.post("sessions/search", session_id=world.hers.session_id))["sessions"] == []


def test_after_all_that_everything_of_hers_is_as_it_was(world: World) -> None:
    world.hers.works()
    alice, s = world.alice, world.hers.session_id
    ok(alice.post("session_heartbeat", session_id=s))
    shown = ok(alice.get(f"sessions/{s}"))
    assert (shown["training_run_ids"], shown["sampler_ids"]) == ([world.hers.model_id], [f"{s}:sample:0"])
    found = {c["checkpoint_id"]: c for c in ok(alice.get("checkpoints"))["checkpoints"]}
    assert found.keys() == {"weights/ck", "sampler_weights/samp", "external_weights/ext"}
    assert not any(c["public"] or c.get("expires_at") for c in found.values())
    assert alice.result(alice.sample(f"{s}:sample:0", 51))["sequences"]
    assert alice.result(world.sample_request)["sequences"]
    assert ok(world.bob.get("checkpoints"))["checkpoints"] == []
    world.his.works()


def test_what_is_published_can_be_used_but_not_changed(world: World) -> None:
    alice, bob, s = world.alice, world.bob, world.hers.session_id
    public = CHECKPOINT.format(s=s)
    assert alice.http.post(f"/api/v1/{public}/publish").status_code == 204
    try:
        assert ok(CALLS["weights_info"](world, bob, s))["lora_rank"] == 4
        assert "error" not in bob.result(CALLS["load it"](world, bob, s))
        made = ok(CALLS["load it as new"](world, bob, s))
        assert "error" not in bob.result(made)
        Model(bob, made["model_id"]).works()
        sampler = ok(CALLS["sample its checkpoint"](world, bob, s))["sampling_session_id"]
        assert bob.result(bob.sample(sampler))["sequences"]
        assert bob.result(CALLS["sample by path"](world, bob, s))["sequences"]
        for name in ("delete", "publish", "unpublish", "ttl", "its checkpoints", "save over it", "get_info", "session"):
            refused(CALLS[name](world, bob, s), 404)
        for name in ("sample its sampler checkpoint", "download"):  # what lies beside it is not public
            refused(CALLS[name](world, bob, s), 404)
    finally:
        assert alice.http.delete(f"/api/v1/{public}/publish").status_code == 204
    refused(CALLS["load it"](world, bob, s), 404)
    refused(CALLS["weights_info"](world, bob, s), 404)


# Keys


def routes(world: World) -> list[tuple[str, str]]:
    document = world.server.http().get("/openapi.json").json()
    found = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    filled = [(m, path.replace("{kind}", "weights").replace("{", "").replace("}", "")) for m, path in found]
    open_to_all = ("health", "readyz", "/files/", "apikey/me")
    return [(m, p) for m, p in filled if not any(word in p for word in open_to_all)]


PLAYING = (
    *(f"/episodes/v1/{what}" for what in ("claim", "heartbeat", "end", "release")),
    *("/claim_episode", "/end_episode", "/abort_episode", "/can_continue_episode"),
)
"""What a worker may do."""
SEEN_BY_WORKERS = ("/get_engine_status", "/get_episode_buffer")


SEEN_BY_METRICS = ("/metrics", "/api/v1/usage", "/api/v1/quotas")


def test_every_call_needs_a_key_with_the_right(world: World) -> None:
    """Whatever a new route will be called: it is in the OpenAPI, so it is tried here."""
    of_right = (world.keys[name] for name in ("a worker", "an episode", "prometheus"))
    expected = {None: 401, "tml-" + "0" * 64: 401, "": 401, **dict.fromkeys(of_right, 403)}
    tried = routes(world)
    assert len(tried) > 40
    for key, status in expected.items():
        http = world.server.http(key=key)
        for method, where in tried:
            answer = http.request(method, where, json={} if method in ("POST", "PUT") else None)
            requested = status
            if key == world.keys["a worker"]:
                requested = 400 if where in PLAYING else 200 if where in SEEN_BY_WORKERS else status
            if key == world.keys["prometheus"] and where in SEEN_BY_METRICS:
                requested = 200
            assert answer.status_code == requested, f"{key} {method} {where}: {answer.status_code} {answer.text}"


def test_metrics_are_for_who_may_see_every_owner(world: World) -> None:
    ok_to_see = [world.server.http(key=world.keys[name]).get("/metrics") for name in ("carol", "prometheus")]
    assert all(answer.status_code == 200 and "palestra_requests_total" in answer.text for answer in ok_to_see)
    bearer = {"authorization": f"Bearer {world.keys['prometheus']}"}  # as Prometheus sends it
    assert world.server.http(key=None).get("/metrics", headers=bearer).status_code == 200
    said = refused(world.alice.http.get("/metrics"), 403, said="needs admin or metrics")
    assert "owner" not in said


def test_a_key_may_ask_about_itself_whatever_its_right(world: World) -> None:
    assert ok(Raw(world.server, world.keys["a worker"]).get("auth/apikey/me"))["note"] == "right: worker"
    refused(Raw(world.server, "tml-wrong").get("auth/apikey/me"), 401)


def test_usage_and_quotas_are_ones_own(world: World) -> None:
    for name in ("usage", "quotas"):
        found = {
            who: ok(Raw(world.server, world.keys[who]).get(name)) for who in ("alice", "bob", "carol", "prometheus")
        }
        owners = {who: [one["owner"] for rows in said.values() for one in rows] for who, said in found.items()}
        assert set(owners["alice"]) == {"alice"}, name
        assert set(owners["bob"]) <= {"bob"}, name
        assert {"alice"} < set(owners["carol"]) | {"carol"}
        assert owners["prometheus"] == owners["carol"]
    refused(world.bob.get("usage?owner=alice"), 403)


def test_an_admin_key_is_another_owner_too(world: World) -> None:
    refused(Raw(world.server, world.keys["carol"]).post("get_info", model_id=world.hers.model_id), 404)


def test_two_keys_of_one_owner_see_the_same(world: World) -> None:
    second = Raw(world.server, world.server.make_key("alice's second", owner="alice"))
    assert ok(second.post("get_info", model_id=world.hers.model_id))["model_id"] == world.hers.model_id


def test_a_revoked_key_stops_working_within_seconds(world: World) -> None:
    from palestra.cli import main

    dave = Raw(world.server, world.server.make_key("dave"))
    ok(dave.get("sessions"))
    done = CliRunner().invoke(main, ["key", "revoke", "dave", "--state", str(world.server.state)])
    assert done.exit_code == 0, done.output
    until(lambda: dave.get("sessions").status_code == 401, timeout_s=30)  # the server looks every other second
    refused(dave.post("create_session"), 401)


def test_other_users_of_the_machine_read_neither_the_database_nor_the_journal(world: World) -> None:
    state = world.server.state
    files = [*state.glob("palestra.db*"), *(state / "journal").rglob("*.journal")]
    assert len(files) > 3
    assert {file.name: oct(file.stat().st_mode & 0o077) for file in files} == dict.fromkeys(
        (file.name for file in files), "0o0"
    )


def test_no_key_reaches_a_file(world: World) -> None:
    """Debug logs, the worker's log, database, journal: whatever way a key came, it is in none of them."""
    key = world.keys["alice"]
    traceback = {"event": "UNHANDLED_EXCEPTION", "traceback": f"headers: X-API-Key: {key}"}
    ok(world.alice.post("telemetry", events=[traceback], session_id=world.hers.session_id, platform="x"))
    world.alice.http.get(f"/api/v1/sessions/{key}")
    world.alice.http.get(f"/api/v1/samplers/{key}?x={key}")
    refused(world.alice.post("get_info", model_id=key), 404)
    refused(world.alice.http.post("/api/v1/forward_backward", content=key.encode(), headers=PROTOBUF))
    refused(world.alice.http.post("/api/v1/asample", content=f'{{"{key}": 1}}'.encode()))
    ok(world.alice.http.get("/api/v1/sessions", headers={"authorization": f"Bearer {key}"}))
    world.server.http(key=key + "x").get("/api/v1/sessions")
    files = [f for f in world.server.folder.rglob("*") if f.is_file()]
    assert {world.server.log, world.server.worker_log} <= set(files)
    for file in files:
        content = file.read_bytes()
        assert not [name for name, key in world.keys.items() if key.encode() in content], f"{file} holds a key"
    assert b"path=/api/v1/telemetry" in world.server.log.read_bytes()


# Where requests come from


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8000"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "localhost.evil.example"},
        {"host": "10.0.0.1"},
        {"host": "["},
        {"host": "[::1"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": "http://localhost:1"},
        {"origin": ""},
    ],
    ids=lambda headers: str(headers).replace("::", "_"),  # xdist splits a test's name at "::"
)
def test_a_page_in_a_browser_cannot_reach_a_local_server(world: World, headers: dict[str, str]) -> None:
    """By a name of its own that leads here (DNS rebinding), or across origins. Even with a key."""
    refused(world.alice.http.get("/api/v1/sessions", headers=headers), 403)
    refused(world.alice.http.post("/api/v1/create_session", json={}, headers=headers), 403)


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:{port}", "127.0.0.1:{port}", "127.0.0.9", "[::1]:{port}"],
    ids=["name", "name and port", "address and port", "another address", "IPv6"],
)
def test_the_names_of_this_machine_are_fine(world: World, host: str) -> None:
    host = host.format(port=world.server.port)
    ok(world.alice.http.get("/api/v1/sessions", headers={"host": host}))
    ok(world.alice.http.get("/api/v1/sessions", headers={"host": host, "origin": f"http://{host}"}))


# Downloads


def test_a_signed_url_cannot_be_altered_or_lent_to_other_files(world: World) -> None:
    place = f"training_runs/{world.hers.model_id}/checkpoints/external_weights/ext/external_weights_urls"
    url = ok(world.alice.get(place))["urls"]["adapter_config.json"]
    assert httpx.get(url).status_code == 200
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    changes: list[dict[str, str]] = [
        {"expires": str(int(query["expires"]) + 3600)},
        {"expires": ""},
        {"version": "0" * len(query["version"])},
        {"signature": query["signature"][:-1] + ("0" if query["signature"][-1] != "0" else "1")},
        {"signature": ""},
        {"signature": query["signature"].upper()},
    ]
    for change in changes:
        altered = urlunsplit((*parts[:3], urlencode(query | change), ""))
        assert httpx.get(altered).status_code in (400, 403), change
    for old, new in (
        ("adapter_config.json", "adapter_model.safetensors"),
        ("adapter_config.json", "..%2f..%2fweights%2fck%40%2fadapter_config.json"),
        ("external_weights/ext", "weights/ck"),
        (world.hers.model_id, world.his.model_id),
    ):
        assert httpx.get(url.replace(old, new)).status_code in (403, 404), new


# Numbers within one session


def test_a_kept_sampler_and_a_sampling_session_cannot_share_a_number(world: World) -> None:
    bob, his = world.bob, world.his
    named = {"session_id": his.session_id, "base_model": NAME}
    bob.result(his.keep(20))
    refused(bob.post("create_sampling_session", sampling_session_seq_id=20, **named), said="already exists")
    base = bob.base_sampler(his.session_id, 21)
    refused(his.keep(21), said="already exists")
    refused(his.keep(20), said="already exists")
    assert bob.base_sampler(his.session_id, 21) == base
    his.works()


def test_a_number_of_anothers_sampler_in_ones_own_session_is_ones_own(world: World) -> None:
    """Numbers are a session's: Bob's number 0 is not Alice's."""
    kept = world.bob.result(world.his.keep(0))
    assert kept["sampling_session_id"] == f"{world.his.session_id}:sample:0"
    assert world.bob.result(world.bob.sample(kept["sampling_session_id"]))["sequences"]


# Beyond loopback


def test_beyond_loopback_a_key_is_needed_and_the_first_start_makes_one(make_server: MakeServer) -> None:
    server = make_server(flags=("--host", "0.0.0.0"))
    announced = "admin key (shown this once): "
    key = server.said().partition(announced)[2].split()[0]
    assert key.startswith("tml-")
    server.url = f"http://127.0.0.1:{server.port}"
    refused(Raw(server, None).get("sessions"), 401)
    refused(Raw(server, "tml-test").get("sessions"), 401)
    refused(Raw(server, None).http.get("/metrics"), 401)
    admin = Raw(server, key)
    ok(admin.get("sessions"))
    ok(admin.http.get("/api/v1/sessions", headers={"host": "gpu1.example"}))
    refused(admin.http.get("/api/v1/sessions", headers={"origin": "http://evil.example"}), 403)
    server.stop()
    server.start()
    assert announced not in server.said()
    server.url = f"http://127.0.0.1:{server.port}"
    ok(Raw(server, key).get("sessions"))
    assert server.stop() == 0
