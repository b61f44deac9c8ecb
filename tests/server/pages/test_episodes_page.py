"""The page of episodes: counts, workers, buttons that do what the episode API does, for their owner alone."""

from __future__ import annotations

import pytest

from tests.server.episodes.conftest import player, say
from tests.waiting import until


def states(browser, run: str) -> dict[str, int]:
    (found,) = [one for one in browser.get("/api/v1/episodes").json()["runs"] if one["run"] == run]
    return {name: found[name] for name in ("queued", "leased", "ended", "parked")}


def test_runs_workers_and_episodes_are_shown(alice, open_browser):
    ids = alice.register("g", size=3)
    lease = alice.claim_one()
    browser = open_browser("alice")
    assert states(browser, alice.run) == {"queued": 2, "leased": 1, "ended": 0, "parked": 0}
    found = browser.get("/api/v1/episodes", params={"run": alice.run}).json()
    assert [one["episode_id"] for one in found["episodes"]] == ids
    worker = next(one for one in found["workers"] if alice.run in one["runs"])
    assert worker["client_id"].endswith(":player")
    assert 0 <= worker["oldest_s"] <= found["oldest_lease_s"]
    leased = browser.get("/api/v1/episodes", params={"run": alice.run, "state": "leased"}).json()
    assert [one["episode_id"] for one in leased["episodes"]] == [lease["episode_id"]]
    page = browser.get("/episodes", params={"run": alice.run, "state": "leased"}).text
    assert lease["episode_id"] in page
    assert "1 episodes" in page
    assert browser.get("/episodes", params={"state": "asleep"}).status_code == 400


def test_an_owner_sees_no_episodes_of_another_and_changes_none(alice, open_browser):
    (episode_id,) = alice.register()
    for name in ("bob", "carol"):
        other = open_browser(name)
        assert alice.run not in other.get("/episodes").text
        assert other.get("/api/v1/episodes", params={"run": alice.run}).status_code == 404
        assert other.get(f"/episodes/{episode_id}").status_code == 404
        answer = other.post("/episodes/cancel", data={"run": alice.run, "episode_id": episode_id})
        assert answer.status_code == 404
        assert other.post("/episodes/requeue", data={"episode_id": episode_id}).status_code == 404
    assert alice.episode(episode_id)["state"] == "queued"


def test_a_button_cancels(alice, open_browser):
    (episode_id,) = alice.register()
    row = open_browser("alice").post("/episodes/cancel", data={"run": alice.run, "episode_id": episode_id}).text
    assert "cancelled" in row
    assert alice.episode(episode_id)["state"] == "cancelled"


def test_a_button_queues_lost_ones_again(alice, open_browser):
    alice.put_run(max_attempts=1)
    lost, _ = alice.register(size=2, on_loss="shrink", min_size=1)
    assert alice.claim_one(lease_s=1)["episode_id"] == lost
    until(lambda: alice.episode(lost)["state"] == "parked")
    browser = open_browser("alice")
    assert states(browser, alice.run)["parked"] == 1
    assert "Requeue" in browser.get("/episodes", params={"run": alice.run, "state": "parked"}).text
    row = browser.post("/episodes/requeue", data={"episode_id": lost})
    assert "queued" in row.text
    assert alice.episode(lost)["state"] == "queued"
    again = browser.post("/episodes/requeue", data={"episode_id": lost})
    assert (again.status_code, "only parked episodes" in again.text) == (409, True)


@pytest.mark.parametrize("headers", [{"origin": "http://evil.example"}, {"sec-fetch-site": "same-site"}])
def test_a_forged_request_cancels_nothing(alice, open_browser, headers):
    (episode_id,) = alice.register()
    data = {"run": alice.run, "episode_id": episode_id}
    assert open_browser("alice").post("/episodes/cancel", data=data, headers=headers).status_code == 403
    assert alice.episode(episode_id)["state"] == "queued"


def test_an_episode_leads_to_its_calls_with_secrets_masked(alice, open_browser):
    alice.register()
    lease = alice.claim_one()
    say(player(lease), [{"role": "user", "content": "call 555-1234, what is 1 + 1? <b>"}])
    alice.end(lease)
    browser = open_browser("alice")
    page = browser.get(f"/episodes/{lease['episode_id']}").text
    assert "what is 1 + 1? &lt;b&gt;" in page
    assert "555-1234" not in page
    (link,) = {part.split('"')[0] for part in page.split('href="../traces/')[1:]}
    assert browser.get(f"/traces/{link}").status_code == 200
