"""OpenEnv's protocol on the wire: episodes over WebSockets, single requests over HTTP, tasks, wrong messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from palestra.environments.fleet import FleetTaskEnv
from palestra.environments.platform import APPS, Instance, make_task
from palestra.environments.platform.api.auth import LOCAL_TEAM, PlatformAuth
from palestra.environments.platform.api.openenv.sessions import OpenEnvSession
from palestra.environments.platform.api.openenv.wire import FinishAction
from palestra.environments.platform.golden import play_golden
from palestra.environments.platform.pool import InstancePool
from palestra.environments.platform.pool_records import InstanceSpec, PoolLimits
from palestra.environments.platform.seeds import seed_named
from tests.environments.fleet.scripted import call
from tests.environments.platform.api.conftest import KEY, Platform, started
from tests.environments.platform.api.test_mcp import CALLS
from tests.waiting import until

TASK = "keys-put_number-0b-17"
ANSWERED = "keys-largest-2-3"


class Player:
    """A client that knows nothing but frames."""

    def __init__(self, socket: Connection) -> None:
        self.socket = socket

    def said(self, message: Any) -> str:
        self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))
        return str(self.socket.recv(timeout=30))

    def send(self, kind: str, **data: Any) -> dict[str, Any]:
        return json.loads(self.said({"type": kind, "data": data}))

    def reset(self, **data: Any) -> dict[str, Any]:
        response = self.send("reset", **data)
        assert response["type"] == "observation", response
        return response["data"]

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        return self.send("step", type="call_tool", tool_name=tool, arguments=arguments)["data"]

    def finish(self, **data: Any) -> dict[str, Any]:
        return self.send("step", type="finish", **data)["data"]


@contextmanager
def connected(platform: Platform, path: str = "keys/ws", key: str | None = None) -> Iterator[Player]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    address = f"{platform.url.replace('http', 'ws', 1)}/openenv/{path}"
    with connect(address, additional_headers=headers, proxy=None) as socket:
        yield Player(socket)


def alive(platform: Platform, team: str = LOCAL_TEAM) -> int:
    return sum(not record.is_over for record in platform.pool.records(team))


@pytest.fixture(scope="module")
def guarded() -> Iterator[Platform]:
    """One that wants a key, with room for two instances."""
    with InstancePool(PoolLimits(max_per_team=2)) as pool:
        for url in started(pool, PlatformAuth([KEY, "other"], secret=b"of the tests")):
            yield Platform(pool, url)


# Episodes


def test_an_episode_ends_with_its_reward_and_leaves_nothing(platform: Platform):
    before, task = alive(platform), make_task(TASK)
    with connected(platform) as player:
        response = player.reset(task_key=TASK, episode_id="mine")
        assert response["observation"]["prompt"] == task.prompt
        assert response["observation"]["variables"] == dict(task.variables)
        assert response["metadata"] == response["observation"]["metadata"]
        assert response["metadata"]["task_key"] == TASK
        assert (response["reward"], response["done"], alive(platform)) == (None, False, before + 1)
        assert player.call("put", value=task.params["value"])["reward"] is None
        state = {"episode_id": "mine", "step_count": 1, "task_key": TASK, "done": False}
        assert json.loads(player.said({"type": "state"})) == {"type": "state", "data": state}
        response = player.finish()
        assert (response["reward"], response["done"], response["metadata"]["is_verdict_known"]) == (1.0, True, True)
        for again in (player.finish(), player.call("list")):
            assert again["code"] == "EXECUTION_ERROR"
            assert "reset for another" in again["message"]
        player.reset(task_key=TASK)
        assert player.call("list")["observation"]["error"] is None
        assert player.finish()["reward"] == 0.0
        player.socket.send('{"type": "close"}')
        with pytest.raises(ConnectionClosed):
            player.socket.recv(timeout=30)
    until(lambda: alive(platform) == before)


def test_one_call_more_than_the_task_allows_ends_it(platform: Platform):
    task = make_task(TASK)
    with connected(platform) as player:
        for value, reward in ((task.params["value"], 1.0), (task.params["value"] + 1, 0.0)):
            assert player.reset(task_key=TASK)["metadata"]["max_turns"] == 2
            assert player.send("step", type="list_tools")["data"]["observation"]["tools"]  # no turn
            assert player.call("put", value=value)["done"] is False
            assert player.call("nothing")["observation"]["error"]["error_type"] == "tool_not_found"  # one, too
            response = player.call("put", value=5)
            assert (response["done"], response["reward"]) == (True, reward)
            assert response["metadata"]["done_reason"] == "max_turns"
            assert response["observation"]["error"]["error_type"] == "execution_error"
            assert "allows 2 tool calls" in response["observation"]["error"]["message"]
            assert player.finish()["code"] == "EXECUTION_ERROR"
            assert player.send("state")["data"]["done"] is True
        rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "put", "arguments": {"value": 5}}}
        player.reset(task_key=TASK)
        player.call("put", value=task.params["value"])
        player.call("list")
        assert "allows 2 tool calls" in player.send("mcp", **rpc)["data"]["error"]["message"]
        assert player.finish()["reward"] == 1.0  # what was refused was not done


def test_the_last_call_that_is_allowed_may_be_followed_by_an_answer(platform: Platform):
    expected = make_task(ANSWERED).params["wanted"]
    with connected(platform) as player:
        turns = player.reset(task_key=ANSWERED)["metadata"]["max_turns"]
        for _ in range(turns):
            assert player.call("list")["done"] is False
        response = player.call("submit_final_answer", answer=expected)
        assert (response["reward"], response["metadata"]["done_reason"]) == (1.0, "finished")


def test_a_client_that_plays_on_keeps_the_reward_that_ended_it(platform: Platform):
    value = make_task(TASK).params["value"]
    given = {"url": f"{platform.url}/openenv/keys", "reset": {"task_key": "{task_key}"}, "finish": {"type": "finish"}}
    config = {"tasks_file": "platform:keys", "backend": "openenv", "openenv": given}
    env = FleetTaskEnv(config, {"task_key": TASK, "max_turns": 9})
    env.init([])
    for said in (call("put", value=value), call("list"), call("put", value=1)):
        assert not env.step(said)["done"]
    assert env.step("<done>")["reward"] == 1.0
    env.close()


def test_observations_are_the_same_bytes_as_in_process(platform: Platform):
    calls = [(tool, arguments) for tool, arguments in CALLS if isinstance(arguments, dict)]
    alone = Instance(seed_named(APPS["keys"], "small-0"))
    rpc: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
    named = platform.stranger.post("/openenv/keys/mcp", json=rpc).json()["result"]
    with connected(platform) as player, connected(platform, "keys/mcp") as talker:
        for tool, arguments in calls:
            expected = alone.call(tool, arguments)
            step = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
            message = rpc | {"method": "tools/call", "params": {"name": tool, "arguments": arguments}}
            raw = msgspec.json.decode(player.said({"type": "step", "data": step}), type=dict[str, msgspec.Raw])
            fields = msgspec.json.decode(raw["data"], type=dict[str, msgspec.Raw])
            observation = msgspec.json.decode(fields["observation"], type=dict[str, msgspec.Raw])
            assert bytes(observation["result"]) == expected.text.encode()
            assert (bytes(observation["error"]) == b"null") is not expected.is_error
            in_session = message | {"params": {**message["params"], **named}}
            answers = [
                talker.said(message),
                platform.stranger.post("/openenv/keys/mcp", json=in_session).text,
            ]
            for response in map(json.loads, answers):
                assert response["result"]["content"] == [{"type": "text", "text": expected.text}]
            assert f'"data":{expected.text}}}'.encode() in answers[1].encode()
        hashes = set()
        for record in platform.pool.records(LOCAL_TEAM):
            if not record.is_over:
                with platform.pool.use(record.id) as instance:
                    hashes |= {instance.state_hash()} if len(instance.events()) == len(calls) else set()
        assert hashes == {alone.state_hash()}
    platform.stranger.post("/openenv/keys/mcp", json=rpc | {"method": "openenv/session/close", "params": named})


@pytest.mark.parametrize(
    ("tool", "arguments", "kind"),
    [
        ("launch", {}, "tool_not_found"),
        ("put", {"value": "x"}, "invalid_args"),
        ("get", {"name": "nowhere"}, "execution_error"),
    ],
)
def test_what_a_call_got_wrong_has_a_kind(platform: Platform, tool: str, arguments: dict[str, Any], kind: str):
    body = {"action": {"tool_name": tool, "arguments": arguments}, "timeout_s": 3, "request_id": "r"}
    response = platform.stranger.post("/openenv/keys/step", json=body).json()["observation"]
    assert response["error"] == {"error_type": kind, "message": response["result"]["message"]}


@pytest.mark.parametrize("key", ["returns-return_item-2-3", "mail-outages_10-4-3"])
def test_users_and_failing_tools_are_there_after_a_reset(platform: Platform, key: str):
    task = make_task(key)
    steps = play_golden(task, Instance(task.seed, variables=task.variables)).steps
    with connected(platform, f"{task.app.key}/ws") as player:
        player.reset(task_key=key)
        answers = [player.call(call.tool, **call.arguments)["observation"]["result"] for call, _ in steps]
        assert answers == [json.loads(result.text) for _, result in steps]
        assert player.finish()["reward"] == 1.0


def test_a_task_that_wants_an_answer_has_the_tool_that_its_prompt_names(platform: Platform):
    task = make_task(ANSWERED)
    right = play_golden(task, Instance(task.seed)).answer
    with connected(platform) as player:
        player.reset(task_key=TASK)
        names = [tool["name"] for tool in player.send("step", type="list_tools")["data"]["observation"]["tools"]]
        assert names == [tool.name for tool in APPS["keys"].tools]
        player.reset(task_key=ANSWERED)
        tools = player.send("step", type="list_tools")["data"]["observation"]["tools"]
        assert [tool["name"] for tool in tools] == [*names, "submit_final_answer"]
        response = player.call("submit_final_answer", answer=right)
        assert (response["reward"], response["done"], response["observation"]["answer"]) == (1.0, True, right)
        for answer, reward in ((right, 1.0), ("nothing", 0.0), (3, 0.0), (None, 0.0)):
            player.reset(task_key=ANSWERED)
            assert player.finish(answer=answer)["reward"] == reward


def test_a_verifier_that_breaks_is_an_unknown_reward():
    def broken(params: Any, seed: Any) -> Any:
        raise ValueError("broken")

    task = make_task(TASK)
    task = msgspec.structs.replace(task, template=msgspec.structs.replace(task.template, expect=broken))
    with InstancePool() as pool:
        record = pool.create("a", InstanceSpec(app="keys", data=task.seed.key, version="v1"))
        session = OpenEnvSession("id", "a", APPS["keys"], pool, record.id, task=task)
        response = session.step(FinishAction())
        assert (response["reward"], response["done"], response["metadata"]["is_verdict_known"]) == (None, True, False)


# Tasks


def test_an_index_is_the_same_task_everywhere(platform: Platform):
    post = platform.stranger.post
    assert platform.stranger.get("/openenv/keys/list_environments").json() == ["keys"]
    splits = platform.stranger.get("/openenv/keys/Keys/splits").json()
    assert splits == [{"name": "train", "type": "train"}, {"name": "eval", "type": "validation"}]
    templates = len(APPS["keys"].templates)
    seen: list[str] = []
    with connected(platform) as player:
        for split in ("train", "eval"):
            listed = post("/openenv/keys/keys/tasks", json={"split": split}).json()
            some = post("/openenv/keys/keys/task_range", json={"split": split, "start": 3, "stop": 9}).json()["tasks"]
            assert some == listed["tasks"][3:9]
            assert (len(listed["tasks"]), listed["env_name"]) == (10 * templates, "keys")
            one = post("/openenv/keys/keys/task", json={"split": split, "index": 7}).json()["task"]
            assert one == listed["tasks"][7]
            response = player.reset(split=split, index=7)
            assert (response["metadata"]["task_key"], response["metadata"]["split"]) == (one["task_key"], split)
            assert response["observation"]["prompt"] == make_task(one["task_key"]).prompt
            assert platform.stranger.post("/openenv/keys/reset", json={"split": split, "index": 7}).json() == response
            assert player.reset(split=split, seed=7) == response
            number = post("/openenv/keys/keys/num_tasks", json={"split": split}).json()["num_tasks"]
            last = post("/openenv/keys/keys/task", json={"split": split, "index": number - 1}).json()["task"]
            assert make_task(last["task_key"]).key.split == split
            seen += [task["task_key"] for task in [*listed["tasks"], last]]
        drawn = {player.reset()["metadata"]["task_key"] for _ in range(5)}
        assert len(drawn) > 1
        assert {make_task(key).key.split for key in drawn} == {"train"}
        assert player.reset(seed=5) == player.reset(seed=5)
    assert len(set(seen)) == len(seen)


WRONG_RESETS = [
    {"task_key": "keys-put_number-0b-17", "split": "train"},
    {"task_key": "nothing"},
    {"task_key": "mail-mark_read-0-7"},
    {"task_key": "keys-nothing-0b-17"},
    {"task_key": 3},
    {"taskkey": "keys-put_number-0b-17"},
    {"index": 3},
    {"split": "test"},
    {"split": "train", "index": 10**12},
    {"split": "train", "index": -1},
    {"seed": -1},
    {"seed": "x"},
    {"episode_id": "x" * 256},
]


def test_a_reset_to_no_task_is_refused_and_the_old_one_goes_on(platform: Platform):
    with connected(platform) as player:
        player.reset(task_key=TASK)
        for wrong in WRONG_RESETS:
            response = player.send("reset", **wrong)
            assert (response["type"], response["data"]["code"]) == ("error", "VALIDATION_ERROR"), wrong
            assert platform.stranger.post("/openenv/keys/reset", json=wrong).status_code == 422
        player.call("put", value=make_task(TASK).params["value"])
        assert player.finish()["reward"] == 1.0


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("keys/task", {"split": "train", "index": 10**12}, 422),
        ("keys/task", {"split": "train"}, 422),
        ("keys/task", {"split": "test", "index": 0}, 422),
        ("keys/num_tasks", {"split": 3}, 422),
        ("keys/task_range", {"split": "train"}, 422),
        ("keys/task_range", {"split": "train", "start": 0, "stop": 10**30}, 422),
        ("keys/task_range", {"split": "train", "start": -5, "stop": 3}, 422),
        ("mail/tasks", {"split": "train"}, 404),
        ("keys/nothing", {}, 404),
        ("nothing", {}, 404),
        ("step", {"action": {"type": "finish"}}, 400),
        ("step", {"action": {"type": "dance"}}, 422),
        ("step", {"action": {"type": "call_tool", "tool_name": "list", "more": 1}}, 422),
        ("step", {"action": {"type": "list_tools"}, "timeout_s": 0}, 422),
        ("step", {"action": 3}, 422),
        ("step", [], 400),
    ],
)
def test_requests_that_ask_for_nothing_there_is_are_refused(platform: Platform, path: str, body: Any, status: int):
    answer = platform.stranger.post(f"/openenv/keys/{path}", json=body)
    assert (answer.status_code, bool(answer.json()["detail"])) == (status, True)


# HTTP


def test_requests_over_http_know_nothing_of_each_other(platform: Platform):
    before, post = alive(platform), platform.stranger.post
    put = {"action": {"type": "call_tool", "tool_name": "set", "arguments": {"name": "zz", "value": 3}}}
    assert post("/openenv/keys/step", json=put).json()["observation"]["result"] == {"name": "zz", "value": 3}
    look = {"action": {"type": "call_tool", "tool_name": "get", "arguments": {"name": "zz"}}}
    assert post("/openenv/keys/step", json=look).json()["observation"]["error"]
    tools = post("/openenv/keys/step", json={"action": {"type": "list_tools"}}).json()["observation"]["tools"]
    assert [tool["name"] for tool in tools] == [tool.name for tool in APPS["keys"].tools]
    assert platform.stranger.get("/openenv/keys/state").json()["step_count"] == 0
    assert alive(platform) == before


def test_an_environment_says_what_it_is(platform: Platform):
    get = platform.stranger.get
    assert get("/openenv/keys/health").json() == {"status": "healthy"}
    assert get("/openenv/keys/metadata").json()["name"] == "keys"
    schemas = get("/openenv/keys/schema").json()
    assert schemas.keys() == {"action", "observation", "reset_observation", "state"}
    assert all(f"'{kind}'" in str(schemas["action"]) for kind in ("list_tools", "call_tool", "finish"))
    paths = get("/openenv/keys/openapi.json").json()["paths"]
    assert {"/reset", "/step", "/state"} <= paths.keys()
    assert get("/openenv/keys/reset").status_code == 405
    assert get("/openenv/nothing/health").status_code == 404


# Doors


def test_who_has_no_key_plays_nothing(guarded: Platform):
    assert guarded.stranger.get("/openenv/keys/health").status_code == 200
    for path in ("reset", "step", "mcp", "keys/tasks"):
        assert guarded.stranger.post(f"/openenv/keys/{path}", json={}).status_code == 401
    for path, key, status in (("keys/ws", None, 401), ("keys/mcp", "wrong", 401), ("nothing/ws", KEY, 404)):
        with pytest.raises(InvalidStatus) as refused, connected(guarded, path, key):
            pass
        assert refused.value.response.status_code == status
        assert json.loads(refused.value.response.body)["detail"]


def test_pages_of_others_cannot_open_sockets(platform: Platform):
    address = f"{platform.url.replace('http', 'ws', 1)}/openenv/keys/ws"
    with pytest.raises(InvalidStatus) as refused, connect(address, origin="http://evil.example", proxy=None):  # type: ignore[arg-type]
        pass
    assert refused.value.response.status_code == 403


def test_when_there_is_no_room_the_client_is_told(guarded: Platform):
    with connected(guarded, key=KEY), connected(guarded, "keys/mcp", KEY):
        with connected(guarded, key=KEY) as third:
            response = json.loads(third.socket.recv(timeout=30))
            assert response["data"].pop("message")
            assert response == {
                "type": "error",
                "data": {"code": "CAPACITY_REACHED", "active_sessions": 2, "max_sessions": 2},
            }
            with pytest.raises(ConnectionClosed):
                third.socket.recv(timeout=30)
        with connected(guarded, "keys/mcp", KEY) as third:
            assert json.loads(third.socket.recv(timeout=30))["error"]["code"] == -32000
        for method in ("openenv/session/create", "initialize"):
            rpc = {"jsonrpc": "2.0", "id": 1, "method": method}
            assert guarded.http.post("/openenv/keys/mcp", json=rpc).json()["error"]["code"] == -32000
        with connected(guarded, key="other") as other:
            assert other.call("list")["observation"]["error"] is None
    until(lambda: guarded.pool.usage().instances == 0)
    with connected(guarded, key=KEY) as player:
        assert player.call("list")["observation"]["error"] is None


# What goes wrong


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "INVALID_JSON"),
        (b"\xff\xfe", "INVALID_JSON"),
        ("[" * 5000, "INVALID_JSON"),
        ("[]", "VALIDATION_ERROR"),
        ("3", "VALIDATION_ERROR"),
        ({"type": 3}, "VALIDATION_ERROR"),
        ({"type": "step", "data": []}, "VALIDATION_ERROR"),
        ({"type": "step", "more": 1}, "VALIDATION_ERROR"),
        ({"type": "step"}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"type": "call_tool"}}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"tool_name": "put", "arguments": [1]}}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"type": "finish"}}, "EXECUTION_ERROR"),
        ({}, "UNKNOWN_TYPE"),
        ({"type": "dance"}, "UNKNOWN_TYPE"),
    ],
)
def test_a_wrong_message_is_told_so_and_the_next_one_is_heard(platform: Platform, message: Any, code: str):
    with connected(platform) as player:
        response = json.loads(player.said(message))
        assert (response["type"], response["data"]["code"]) == ("error", code)
        assert response["data"]["message"]
        assert player.call("list")["observation"]["error"] is None


def test_an_instance_that_somebody_ended_ends_the_connection(platform: Platform):
    with connected(platform, key="ender") as player:
        player.reset(task_key=TASK)
        (running,) = platform.http.get("/v1/env/instances", headers={"Authorization": "Bearer ender"}).json()
        path = f"/v1/env/instances/{running['instance_id']}"
        platform.http.delete(path, headers={"Authorization": "Bearer ender"})
        response = player.send("step", type="call_tool", tool_name="list")["data"]
        assert (response["code"], "closed by its owner" in response["message"]) == ("SESSION_ERROR", True)
        with pytest.raises(ConnectionClosed):
            player.socket.recv(timeout=30)


def test_a_frame_that_is_too_long_ends_the_connection_and_the_instance(platform: Platform):
    before = alive(platform)
    with connected(platform) as player, pytest.raises(ConnectionClosed):
        player.reset(episode_id="x" * (20 << 20))
    until(lambda: alive(platform) == before)


def test_clients_that_vanish_leave_nothing(platform: Platform):
    """Without a word: between messages, and with one on its way."""
    before = alive(platform)
    for path in ("keys/ws", "keys/mcp"):
        for has_asked in (False, True):
            with connected(platform, path) as player:
                if has_asked:
                    player.socket.send('{"type": "reset", "data": {"task_key": "keys-put_number-0b-17"}}')
                until(lambda: alive(platform) == before + 1)
                player.socket.socket.shutdown(2)
            until(lambda: alive(platform) == before)
