"""Who is next: by priority and registration within a run and kind, by shares between runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from msgspec.structs import replace

from palestra.types.episodes import ClaimRequest, EpisodeKind, NewGroup
from tests.episodes.play import TASK, Play


def order(play: Play, count: int = 100, **options: Any) -> list[str]:
    return [lease.group_id for lease in play.claim(count, **options)]


def test_priority_comes_first_then_registration() -> None:
    play = Play()
    for name, priority in (("a", 0), ("b", -1), ("c", 5), ("d", 0), ("e", 5)):
        play.register(name, priority=priority)
    play.restart()
    assert order(play) == ["c", "e", "a", "d", "b"]


def test_a_retried_episode_is_not_behind_those_that_came_later() -> None:
    play = Play(lease_s=1.0)
    for name in ("a", "b", "c"):
        play.register(name)
    play.lose()
    assert order(play) == ["a", "b", "c"]


def test_eval_comes_first_or_last_and_may_be_asked_for() -> None:
    for eval_first, expected in ((True, ["e", "f", "t"]), (False, ["t", "e", "f"])):
        play = Play(eval_first=eval_first)
        play.register("t")
        play.register("e", kind=EpisodeKind.EVAL)
        play.register("f", kind=EpisodeKind.EVAL)
        assert order(play) == expected
    play.register("t2")
    assert order(play, kind=EpisodeKind.EVAL) == []
    assert order(play, kind=EpisodeKind.TRAIN) == ["t2"]


def test_runs_are_served_by_their_shares() -> None:
    play = Play()
    for run, share in (("a", 1.0), ("b", 3.0), ("c", 0.5)):
        play.put_run(run, share=share)
        play.register("g", 500, run=run)
    served = Counter(lease.run for _ in range(90) for lease in play.claim(1))
    assert served == {"a": 20, "b": 60, "c": 10}
    more = Counter(lease.run for lease in play.claim(90))
    assert more == served


def test_a_run_that_was_away_does_not_catch_up() -> None:
    play = Play()
    for run in ("a", "b"):
        play.put_run(run)
        play.register("g", 500, run=run)
    play.board.pause("alice", "b", play.now)
    assert Counter(lease.run for lease in play.claim(100)) == {"a": 100}
    play.board.resume("alice", "b", play.now)
    assert Counter(lease.run for lease in play.claim(100)) == {"a": 50, "b": 50}


def test_who_claims_one_kind_does_not_starve_a_run_for_the_others() -> None:
    play = Play()
    for run in ("a", "b"):
        play.put_run(run)
        play.register("t", 100, run=run)
    play.put_run("e")
    play.register("e", 400, run="e", kind=EpisodeKind.EVAL)
    served: Counter[str] = Counter()
    for _ in range(40):
        play.claim(5, kind=EpisodeKind.EVAL)
        served.update(lease.run for lease in play.claim(1, kind=EpisodeKind.TRAIN))
    assert served == {"a": 20, "b": 20}


def test_who_plays_for_one_run_does_not_move_the_order_of_the_others() -> None:
    play = Play()
    for run in ("a", "b"):
        play.put_run(run)
        play.register("g", 200, run=run)
    assert Counter(lease.run for lease in play.claim(100, run="b")) == {"b": 100}
    assert Counter(lease.run for lease in play.claim(100)) == {"a": 50, "b": 50}
    play.board.pause("alice", "b", play.now)
    assert play.claim(run="b") == []


def test_cancelled_episodes_leave_the_queue_for_good() -> None:
    play = Play()
    for number in range(300):
        play.register(f"low{number}", priority=-1)
    play.register("high", 3)
    assert play.cancel(groups=tuple(f"low{number}" for number in range(299))) == 299
    assert order(play, 5) == ["high", "high", "high", "low299"]
    assert play.run().queued == 0


# Shares of environments


def served(play: Play, most: int) -> Counter[str]:
    return Counter(lease.task.environment for lease in play.claim(most))


def register(play: Play, name: str, size: int, environment: str, **options: Any) -> None:
    group = NewGroup(group_id=name, task=replace(TASK, environment=environment), size=size, **options)
    play.board.register("alice", "r", [group], play.now)


def test_environments_are_served_by_their_weights() -> None:
    play = Play(environment_weights={"math": 3.0, "code": 0.5})
    for environment in ("chess", "math", "code", "go"):  # two of them are nobody's favourites: one share
        register(play, environment, 200, environment)
    assert served(play, 90) == {"math": 60, "chess": 20, "code": 10}
    assert sum((served(play, 1) for _ in range(90)), Counter()) == {"math": 60, "chess": 20, "code": 10}
    play.restart()
    assert served(play, 90) == {"math": 60, "chess": 20, "code": 10}


def test_weights_may_change_while_much_waits() -> None:
    play = Play()
    register(play, "first", 100, "math")
    register(play, "second", 100, "code")
    assert served(play, 10) == {"math": 10}
    play.put_run(environment_weights={"code": 4.0})
    assert served(play, 10) == {"math": 2, "code": 8}
    assert play.cancel(groups=("second",)) == 100
    assert served(play, 5) == {"math": 5}
    play.put_run()
    register(play, "third", 5, "code")
    assert served(play, 100) == {"math": 83, "code": 5}
    assert play.run().queued == 0


def test_a_retried_episode_is_the_first_of_its_environment() -> None:
    """Whatever its weight, it is served in its turn."""
    play = Play(environment_weights={"rare": 0.1}, lease_s=1.0)
    register(play, "old", 1, "rare")
    (lost,) = play.claim(1)
    register(play, "others", 50, "often")
    register(play, "young", 5, "rare")
    play.wait(10.0)
    play.wait(10.0)
    rare = [lease for lease in play.claim(40) if lease.task.environment == "rare"]
    assert [(lease.episode_id, lease.attempt) for lease in rare][:1] == [(lost.episode_id, 2)]


def test_priority_goes_before_weights() -> None:
    play = Play(environment_weights={"a": 100.0})
    register(play, "a", 5, "a")
    register(play, "b", 5, "b", priority=1)
    assert order(play, 6) == ["b"] * 5 + ["a"]


# Shares of clients


def test_no_client_holds_more_than_its_share() -> None:
    play = Play(client_share=0.25)
    play.register("g", 40)
    greedy = play.claim(40, client="greedy")
    assert len(greedy) == 10
    assert play.claim(1, client="greedy") == []
    assert [len(play.claim(40, client=name)) for name in "abcd"] == [10, 10, 10, 0]
    play.release(greedy[0], client="greedy")
    play.wait(10.0)
    assert len(play.claim(5, client="a")) == 0
    assert len(play.claim(5, client="greedy")) == 1


def test_one_may_always_be_held_and_the_share_is_of_each_run() -> None:
    play = Play(client_share=0.01)
    play.put_run("other", client_share=1.0)
    play.register("g", 3)
    play.register("g", 3, run="other")
    assert Counter(lease.run for lease in play.claim(10)) == {"r": 1, "other": 3}
    lease = play.claim(1, client="d")[0]
    play.end(lease, client="d")
    assert len(play.claim(1, client="d", run="r")) == 1


def test_who_has_no_room_is_told_why() -> None:
    play = Play(client_share=0.5)
    play.register("g", 2)
    play.claim(1)

    def why(full: dict[str, str] | None = None, **options: Any) -> str:
        request = ClaimRequest(client_id="c", claim_id="x", **options)
        assert play.board.claim("alice", request, play.now, full=full or {}) == []
        return str(play.board.why_nothing("alice", request, full=full or {}))

    words = "client 'c' holds 1 of run 'r', all that its client_share of 0.5 allows"
    assert why() == why(run="r") == f"client_share: {words}"
    assert why(kind=EpisodeKind.EVAL) == "None"
    assert why({"": "9 wait"}) == "engine_full: 9 wait"
    play.board.note_engine("alice", "r", "m")
    assert why({"m": "8 wait"}) == "engine_full: 8 wait"
    assert why({"other": "9 wait"}) == f"client_share: {words}"
    play.pause()
    assert why() == "paused: run 'r' is paused" == play.run().held


def test_a_spent_share_is_told_before_what_holds_other_runs() -> None:
    """Who waits behind such a client is looked at then: another run that is paused must not hide it."""
    play = Play()
    play.put_run("shared", client_share=0.1)
    play.register("g")
    play.pause()
    play.register("g", 2, run="shared")
    play.claim(1)
    request = ClaimRequest(client_id="c", claim_id="x")
    assert str(play.board.why_nothing("alice", request)).startswith("client_share: ")
    assert str(play.board.why_nothing("alice", replace(request, client_id="d"))) == "paused: run 'r' is paused"


def test_a_lease_that_ends_wakes_its_client() -> None:
    play = Play(client_share=0.5)
    play.register("g", 4)
    lease, _ = play.claim(2)
    play.board.take_news()
    play.end(lease)
    assert play.board.take_news().claimable == {"alice"}
