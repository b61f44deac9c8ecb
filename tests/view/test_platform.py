"""A task of the platform, played by hand: over the API, over the page's forms, apart for each owner, within limits."""

from __future__ import annotations

import pytest

from palestra.environments.platform import Instance, make_task
from palestra.environments.platform.golden import play_golden
from palestra.view.tasks import task_plays
from palestra.view.tasks.task_plays import NoSuchPlay, PlayLimit, TaskChoice, TaskPlays
from palestra.view.tasks.tool_forms import read_arguments
from tests.view.folders import HOSTILE

API = "/api/v1/platform"
TASK = "mail-mark_read-0-17"
ASKS = "keys-largest-2-3"


def solution(key: str):
    task = make_task(key)
    return play_golden(task, Instance(task.seed))


def test_the_solution_of_a_task_is_called_and_the_verdict_follows(client):
    play = client.post(f"{API}/plays", json={"task": TASK}).json()
    assert play["verdict"]["score"] == 0.0
    assert play["changes"] == []
    for call, _ in solution(TASK).steps:
        asked = {"tool": call.tool, "arguments": call.arguments}
        play = client.post(f"{API}/plays/{play['id']}/calls", json=asked).json()
        assert not play["calls"][-1]["is_error"]
    assert play["verdict"]["score"] == 1.0
    (change,) = play["changes"]
    assert change["kind"] == "update"
    assert client.get(f"{API}/plays/{play['id']}").json() == play
    (listed,) = client.get(f"{API}/plays").json()
    assert (listed["task"], listed["calls"]) == (TASK, len(play["calls"]))
    assert client.delete(f"{API}/plays/{play['id']}").json() == []
    assert client.get(f"{API}/plays/{play['id']}").status_code == 404


def test_forms_made_from_the_schema_of_tools_play_a_task_to_its_end(client):
    chosen = client.post("/platform", data={"app": "mail", "template": "mark_read", "number": "17"})
    assert chosen.status_code == 200
    assert str(chosen.url).startswith("http://localhost:8400/platform/")
    page, here = chosen.text, chosen.url.path
    assert TASK in page
    assert make_task(TASK).prompt in page
    assert 'name="unread"' in page
    assert "<option>true</option><option>false</option>" in page
    shown = ""
    for call, _ in solution(TASK).steps:
        fields = {name: str(value).lower() for name, value in call.arguments.items()}
        shown = client.post(f"{here}/tools/{call.tool}", data=fields, headers={"hx-request": "true"}).text
    assert "<html" not in shown
    assert '<b class="passed">1</b>' in shown
    assert "change-update" in shown
    wrong = client.post(f"{here}/tools/get_message", data={"id": HOSTILE}).text
    assert "bad_arguments" in wrong
    assert "<script>alert" not in wrong
    assert "\x1b" not in wrong
    ended = client.post(f"{here}/end")
    assert ended.url.path == "/platform"
    assert "You are playing" not in ended.text
    assert "begin the task again" in client.post(f"{here}/tools/get_message", data={"id": "1"}).text
    assert client.get(here).status_code == 404


def test_an_answer_is_judged_and_may_be_given_again(client):
    play = client.post(f"{API}/plays", json={"task": ASKS}).json()
    assert play["asks_for_answer"]
    here = f"{API}/plays/{play['id']}"
    for call, _ in solution(ASKS).steps:
        client.post(f"{here}/calls", json={"tool": call.tool, "arguments": call.arguments})
    assert client.post(f"{here}/answer", json={"answer": "no"}).json()["verdict"]["missed"] == ["answer"]
    answer = solution(ASKS).answer
    page = client.post(f"/platform/{play['id']}/tools/submit_final_answer", data={"answer": answer}).text
    assert '<b class="passed">1</b>' in page
    assert client.get(here).json()["answer"] == answer


@pytest.mark.parametrize(
    ("choice", "status", "words"),
    [
        ({"task": "mial-mark_read-0-17"}, 404, "did you mean"),
        ({"app": "mail", "template": "mark_raed"}, 404, "mark_read"),
        ({"task": "no key"}, 404, "is not a task key"),
        ({"app": "conf"}, 404, "has no tasks"),
        ({"what": 1}, 400, "unknown field"),
    ],
)
def test_a_task_that_is_none_is_refused_with_the_nearest(client, choice, status, words):
    answer = client.post(f"{API}/plays", json=choice)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_the_page_lists_apps_and_keeps_what_was_typed(client):
    page = client.get("/platform", params={"app": "stay"}).text
    assert "Tasks of Stay" in page
    assert 'href="./platform?app=forum"' in page
    wrong = client.post("/platform", data={"task": "mail-nothing-0-1"})
    assert wrong.status_code == 400
    assert 'value="mail-nothing-0-1"' in wrong.text
    assert [one["key"] for one in client.get(f"{API}/apps").json()][:2] == ["keys", "mail"]


def test_plays_belong_to_their_owner_and_the_oldest_ends():
    plays = TaskPlays()
    first = plays.begin("alice", TaskChoice(app="keys"))
    with pytest.raises(NoSuchPlay):
        plays.show("bob", first.id)
    with pytest.raises(NoSuchPlay):
        plays.call("bob", first.id, "list", {})
    newer = [plays.begin("alice", TaskChoice(app="keys")).id for _ in range(task_plays.MAX_OWN)]
    assert [one.id for one in plays.list("alice")] == newer[::-1]
    assert plays.list("bob") == []


def test_plays_are_bounded_in_number_in_calls_and_in_time():
    now = [0.0]
    plays = TaskPlays(lambda: now[0])
    first = plays.begin("0", TaskChoice(task=TASK))
    for owner in range(1, task_plays.MAX_PLAYS):
        plays.begin(str(owner), TaskChoice(task=TASK))
    with pytest.raises(PlayLimit):
        plays.begin("one more", TaskChoice(task=TASK))
    for _ in range(task_plays.MAX_CALLS):
        plays.call("0", first.id, "no_such_tool", {})
    with pytest.raises(PlayLimit):
        plays.call("0", first.id, "no_such_tool", {})
    now[0] += task_plays.IDLE_S + 1
    plays.begin("one more", TaskChoice(task=TASK))
    with pytest.raises(NoSuchPlay):
        plays.show("0", first.id)


def test_fields_become_arguments_by_their_schema():
    schema = {
        "properties": {
            "id": {"type": "integer"},
            "to": {"type": "array", "items": {"type": "string"}},
            "unread": {"type": "boolean"},
            "sort": {"type": "string", "enum": ["new", "old"]},
            "body": {"type": "string"},
            "rest": {"type": "object"},
        },
        "required": ["id", "body"],
    }
    sent = {"id": "17", "to": "a@x.org\r\n b@x.org \r\n", "unread": "false", "body": "1\r\n2", "rest": '{"a": [1]}'}
    assert read_arguments(schema, sent) == {
        "id": 17,
        "to": ["a@x.org", "b@x.org"],
        "unread": False,
        "body": "1\n2",
        "rest": {"a": [1]},
    }
    assert read_arguments(schema, {"id": "x"}) == {"id": "x", "body": ""}
