"""Who is next: by priority and registration within a run and kind, by shares between runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from palestra.types.episodes import EpisodeKind
from tests.episodes.play import Play


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
