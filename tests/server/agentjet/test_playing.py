"""AgentJet's endpoints for players: its own kind of client plays, and what was wrong with the original is not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from palestra.episodes import EpisodeApiError, EpisodeClientError, TinkerScriptClient
from palestra.episodes.client.tinkerscript import WorkflowOutput
from tests.server.agentjet.conftest import AgentJet, Root, say, task_of
from tests.server.episodes.conftest import Api, group
from tests.server.model_api.conftest import Ephebe

OwnerOf = Callable[..., str]


def numbered(number: int, size: int = 4, **fields: Any) -> dict[str, Any]:
    """As trainers register for players with a dataset of their own."""
    task = {"id": str(number), "environment": "dummy", "prompt": []}
    return {**group(f"g{number}", size, **fields), "task": task}


def test_agentjets_own_kind_of_client_plays_whole_groups_of_its_own_dataset(trainer: Api, agentjet: AgentJet) -> None:
    dataset = ["What is 1 + 1?", "What is 2 + 2?", "What is 3 + 3?"]
    trainer.of_run("groups", groups=[numbered(number) for number in range(4)])

    def play(_: int) -> None:
        episode_uuid, access = agentjet.begin_episode()
        number = int(task_of(access).json()["id"]) % len(dataset)
        answer = say(access, dataset[number])
        assert agentjet.can_continue_episode(episode_uuid)
        drawn = answer.choices[0].token_ids
        agentjet.end_episode(episode_uuid, reward=float(number), metadata={"said": dataset[number], "drawn": drawn})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(play, range(16)))
    assert agentjet.told == []
    groups = trainer.played(limit=16)
    assert sorted(one["task"]["id"] for one in groups) == ["0", "1", "2", "3"]
    for one in groups:
        number = int(one["task"]["id"]) % len(dataset)
        assert len(one["episodes"]) == 4
        for episode in one["episodes"]:
            result, (line,) = episode["info"]["result"], episode["trajectories"]
            assert (result["reward"], result["metadata"]["said"]) == (number, dataset[number])
            drawn = [token for token, is_drawn in zip(line["tokens"], line["loss_mask"], strict=True) if is_drawn]
            assert drawn == result["metadata"]["drawn"]


def test_the_task_of_an_attempt_is_for_its_key_while_it_is_played(trainer: Api, agentjet: AgentJet, root: Root) -> None:
    trainer.of_run("groups", groups=[numbered(7, size=1)])
    episode_uuid, access = agentjet.begin_episode()
    assert task_of(access).json() == agentjet.claims[episode_uuid]["task"]
    assert task_of({**access, "openai_api_key": "ep-made-up"}).status_code == 401
    refused = root.server.http(key=root.key).get("/v1/task")
    assert (refused.status_code, "the key of an attempt" in refused.text) == (403, True)
    agentjet.end_episode(episode_uuid, reward=1.0)
    assert (task_of(access).status_code, "is over" in task_of(access).text) == (403, True)


def test_our_class_with_its_names_plays_against_our_server(trainer: Api, plain: Ephebe) -> None:
    trainer.register()
    client = TinkerScriptClient(plain.url)
    assert client.get_engine_status() == "ENGINE.ROLLING"
    episode_uuid, access = client.begin_episode()
    assert access.task is not None
    assert access.claim is not None
    assert (access.task["id"], access.model, access.claim.group_id) == ("t", "ephebe", "g")
    (mine,) = [one for one in client.get_episode_buffer() if one.episode_uuid == episode_uuid]
    assert (mine.episode_status, mine.openai_api_key) == ("claimed", "ep-****")
    assert client.can_continue_episode(episode_uuid)
    with pytest.raises(EpisodeApiError, match="reward is missing"):
        client.end_episode(episode_uuid, WorkflowOutput())
    client.end_episode(episode_uuid, WorkflowOutput(reward=0.5))
    assert not client.can_continue_episode(episode_uuid)
    assert trainer.played()[0]["episodes"][0]["info"]["result"]["reward"] == 0.5


def test_what_is_aborted_is_played_by_another(trainer: Api, plain: Ephebe, root: Root) -> None:
    trainer.register()
    client = TinkerScriptClient(plain.url)
    episode_uuid, _ = client.begin_episode()
    output = {"workflow_output": {"reward": 0.0, "metadata": {}}, "task_id": ""}  # as AgentJet's sends it
    refused = root.post("abort_episode", client_uuid="another", episode_uuid=episode_uuid, **output)
    assert (refused["success"], "another client holds it" in refused["failure_reason"]) == (False, True)
    client.abort_episode(episode_uuid)
    client.abort_episode(episode_uuid)
    with pytest.raises(EpisodeClientError, match="not ended: lease_lost: released: aborted"):
        client.end_episode(episode_uuid, WorkflowOutput(reward=1.0))
    again = root.claim(wait_s=10)
    assert (again["attempt"], root.end(again["episode_uuid"], 0.5)["success"]) == (2, True)
    assert trainer.played()[0]["episodes"][0]["info"]["result"]["reward"] == 0.5


# Claims


def test_a_claim_that_is_repeated_gets_the_same_and_others_get_another(trainer: Api, root: Root) -> None:
    trainer.register(size=2)
    first, again, other = (root.claim(claim_id=name) for name in ("one", "one", "two"))
    assert first == again
    assert first["episode_uuid"] != other["episode_uuid"]
    assert (first["attempt"], first["index_in_group"], first["group_id"], first["weight_version"]) == (1, 0, "g", 0)
    refused = root.claim()
    assert (refused["success"], refused["episode_uuid"], refused["openai_api_key"]) == (False, "", "")
    assert "no episode is waiting" in refused["fail_cause"]


def test_a_lease_is_as_long_as_the_server_allows(trainer: Api, root: Root) -> None:
    trainer.register()
    claimed = root.claim(allow_discard_timeout=1e9)
    assert trainer.episode(claimed["lease_id"].partition("#")[0])["lease_s"] == 3600


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"episode_type": "test"}, "episode_type"),
        ({"allow_discard_timeout": -1}, "allow_discard_timeout must be more than 0 seconds"),
        ({"client_uuid": ""}, "client_uuid is missing"),
        ({"client_uuid": "a b"}, "client_uuid: 1 to 128 of"),
        ({"wait_s": -1}, "wait_s: 0 seconds or more"),
        ({"client_uuid": 7}, "client_uuid"),
    ],
)
def test_a_claim_that_makes_no_sense_is_told_so(trainer: Api, root: Root, fields: Any, said: str) -> None:
    request = {"client_uuid": "c", "episode_type": "train", "allow_discard_timeout": 60, "wait_s": 0} | fields
    answer = root.send("claim_episode", **request)
    assert (answer.status_code, said in answer.json()["detail"]) == (400, True), answer.text


def test_claims_wait_for_weights_and_are_told_where_nobody_trains(keyed: Ephebe, owner_of: OwnerOf) -> None:
    carol = Api(keyed, owner_of("carol"))
    root = Root(keyed, carol.key)
    assert "ENGINE.OFFLINE: there is no trainer" in root.claim()["fail_cause"]
    carol.put_run()
    carol.register()
    carol.of_run("pause")
    assert "ENGINE.WEIGHT_SYNCING" in root.claim()["fail_cause"]
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(root.claim, wait_s=20)
        carol.of_run("resume")
        assert waits.result(20)["success"]


def test_a_claim_that_waits_gets_nothing_while_weights_are_on_their_way(keyed: Ephebe, owner_of: OwnerOf) -> None:
    metrics_key = keyed.make_key("frank's prometheus", owner="prometheus", right="metrics")
    frank = Api(keyed, owner_of("frank"), run="tinkerscript", metrics_key=metrics_key)
    root = Root(keyed, frank.key)
    root.post("update_engine_status", engine_status="ENGINE.ROLLING")
    before = frank.metric("palestra_episode_claims_waiting")
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(root.claim, wait_s=20)
        keyed.until(lambda: frank.metric("palestra_episode_claims_waiting") == before + 1)
        root.post("update_engine_status", engine_status="ENGINE.WEIGHT_SYNCING")
        root.post("register_episode", episode_uuid="ab")
        assert frank.info()["queued"] == 1
        root.post("update_engine_status", engine_status="ENGINE.ROLLING")
        assert waits.result(20)["episode_uuid"] == "ab"


def test_an_evaluation_is_claimed_as_one_and_kept(trainer: Api, root: Root) -> None:
    trainer.register("e", kind="eval")
    assert not root.claim(episode_type="train")["success"]
    claimed = root.claim(episode_type="eval")
    assert root.end(claimed["episode_uuid"], 0.25) == {"success": True, "failure_reason": ""}
    (played,) = trainer.played()
    assert (played["kind"], played["episodes"][0]["info"]["result"]["reward"]) == ("eval", 0.25)


# Ends


def test_an_end_counts_once_and_for_the_one_who_claimed(trainer: Api, root: Root) -> None:
    trainer.register()
    name = root.claim()["episode_uuid"]
    stranger = root.end(name, client_uuid="another")
    assert not stranger["success"]
    assert "another client holds it" in stranger["failure_reason"]
    assert root.end(name, 0.5)["success"]
    assert root.end(name, 0.5)["success"]
    assert "another result, which stands" in root.end(name, 0.75)["failure_reason"]
    assert trainer.of_run("commit", cursor=1)["committed"] == 1
    assert root.end(name, 0.5)["success"]  # sent again long after
    unknown = root.end_with("never-was", reward=1.0)
    assert (unknown.status_code, "not found" in unknown.json()["detail"]) == (400, True)


def test_a_thread_that_lost_its_attempt_cannot_end_the_next_one_of_the_same_client(trainer: Api, root: Root) -> None:
    trainer.register()
    first = root.claim()
    say(first)
    episode_id = first["lease_id"].partition("#")[0]
    trainer.post("release", client_id="c", leases=[{"episode_id": episode_id, "attempt": 1}], reason="a crash")
    second = root.claim()
    answer = say(second)
    assert (second["attempt"], second["episode_uuid"]) == (2, f"{first['episode_uuid']}#2")
    late = root.end(first["episode_uuid"], 1.0)
    assert (late["success"], "released: a crash" in late["failure_reason"]) == (False, True)
    assert not root.can_continue(first["episode_uuid"])["can_continue"]
    assert (
        "does not belong to"
        in root.send(
            "can_continue_episode", client_uuid="c", episode_uuid=first["episode_uuid"], lease_id=second["lease_id"]
        ).json()["detail"]
    )
    assert root.end(second["episode_uuid"], 0.0, lease_id=second["lease_id"])["success"]
    (episode,) = trainer.played()[0]["episodes"]
    (line,) = episode["trajectories"]
    assert (episode["info"]["attempt"], episode["info"]["result"]["reward"]) == (2, 0.0)
    assert line["tokens"] == [*answer.prompt_token_ids, *answer.choices[0].token_ids]


def test_one_that_is_cancelled_hears_why(trainer: Api, root: Root) -> None:
    trainer.register()
    name = root.claim()["episode_uuid"]
    assert root.can_continue(name) == {"can_continue": True, "reason": ""}
    assert not root.can_continue(name, client_uuid="another")["can_continue"]
    trainer.post("cancel", run=trainer.run, group_ids=["g"], reason="enough of them")
    response = root.can_continue(name)
    assert (response["can_continue"], "enough of them" in response["reason"]) == (False, True)
    assert "enough of them" in root.end(name)["failure_reason"]
    assert "unknown" in root.can_continue("never-was")["reason"]


def test_outputs_of_every_shape_become_results(trainer: Api, root: Root) -> None:
    outputs: list[Any] = [
        {"reward": [0.5, 0.25], "metadata": {"any": ["thing"]}},
        {"reward": None, "is_success": True},
        {"reward": 1, "log_metrics": {"turns": 3, "time": {"model": 0.5, "tool": {"s": 2}}}},
        {"reward": 0.0, "log_metrics": {"lengths": [1, 3], "name": "x"}, "is_success": False, "a_new_field": 1},
    ]
    trainer.register(size=len(outputs))
    for output in outputs:
        answer = root.end_with(root.claim()["episode_uuid"], **output)
        assert answer.json() == {"success": True, "failure_reason": ""}
    results = [one["info"]["result"] for one in trainer.played()[0]["episodes"]]
    kept = "tinkerscript/log_metrics"
    assert (results[0]["reward"], results[0]["step_rewards"]) == (None, [0.5, 0.25])
    assert results[0]["metadata"] == {"any": ["thing"]}
    assert (results[1]["reward"], results[1]["is_success"]) == (1.0, True)
    assert results[2]["metrics"] == {"turns": 3.0, "time/model": 0.5, "time/tool/s": 2.0}
    assert results[3]["metrics"] == {"lengths": 2.0}
    assert results[3]["metadata"] == {kept: {"lengths": [1, 3], "name": "x"}}


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ({}, "reward is missing"),
        ({"reward": []}, "reward is missing"),
        ({"reward": "high"}, "reward"),
        ({"reward": True}, "reward"),
        ({"reward": 1.0, "metadata": {"x": "y" * 1_100_000}}, "at most 1048576 bytes"),
    ],
)
def test_an_output_that_teaches_nothing_is_refused_and_the_attempt_goes_on(
    trainer: Api, root: Root, output: Any, said: str
) -> None:
    trainer.register()
    name = root.claim()["episode_uuid"]
    answer = root.end_with(name, **output)
    assert (answer.status_code, said in answer.json()["detail"]) == (400, True), answer.text[:500]
    assert root.can_continue(name)["can_continue"]
    assert root.end(name)["success"]


# Rights


def test_a_worker_plays_and_sees_what_is_its_own(keyed: Ephebe, owner_of: OwnerOf) -> None:
    dave = Api(keyed, owner_of("dave"))
    dave.put_run()
    dave.register(size=3)
    worker, other = (Root(keyed, owner_of("dave", "worker")) for _ in range(2))
    mine, theirs = worker.claim(), other.claim()
    assert not other.end(mine["episode_uuid"])["success"]  # the same client_uuid, another key
    (seen,) = worker.post("get_episode_buffer")["buffer"]
    assert (seen["episode_uuid"], seen["client_uuid"], seen["openai_api_key"]) == (mine["episode_uuid"], "c", "ep-****")
    whole = Root(keyed, dave.key).post("get_episode_buffer")
    assert [one["episode_status"] for one in whole["buffer"]] == ["claimed", "claimed", "registered"]
    assert not any(
        one["openai_api_key"] in (mine["openai_api_key"], theirs["openai_api_key"]) for one in whole["buffer"]
    )
    assert Root(keyed, owner_of("erin")).post("get_episode_buffer") == {"buffer": [], "total": 0}
    assert worker.send("register_episode", episode_uuid="x").status_code == 403
    assert Root(keyed, None).send("claim_episode", client_uuid="c").status_code == 401
    assert Root(keyed, owner_of("erin")).end_with(mine["episode_uuid"], reward=1.0).status_code == 400
    assert worker.end(mine["episode_uuid"])["success"]
    own = Root(keyed, theirs["openai_api_key"])  # the attempt's own key speaks for it alone
    assert own.can_continue(theirs["episode_uuid"])["can_continue"]
    assert own.send("can_continue_episode", client_uuid="c", episode_uuid=mine["episode_uuid"]).status_code == 403
    assert own.end(theirs["episode_uuid"])["success"]


def test_health_needs_no_key(keyed: Ephebe) -> None:
    assert keyed.http(key=None).get("/health").json() == {"status": "ok"}
