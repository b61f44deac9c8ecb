"""Searching a board: what matches, page by page, while others go on."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.episodes import search as searching
from palestra.episodes.errors import BoardError
from palestra.episodes.search import EpisodeSearch
from palestra.types.episodes import EpisodeError, EpisodeResult, EpisodeState, NewGroup
from palestra.types.rollouts import Task
from tests.episodes.play import OWNER, RUN, Play


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """A part is three episodes."""
    monkeypatch.setattr(searching, "PART", 3)
    return Play()


def found(play: Play, *, limit: int | None = 100, offset: int = 0, **wanted: Any) -> tuple[list[str], int]:
    under_way = play.board.search(OWNER, EpisodeSearch(**wanted), limit=limit, offset=offset)
    while under_way.step():
        pass
    return [one.episode_id for one in under_way.found], under_way.total


def test_pages_are_parts_of_the_same_list(play: Play) -> None:
    ids = [one for number in range(7) for one in play.register(f"g{number}", size=2)]
    for lease in play.claim(14):
        play.end(lease, float(ids.index(lease.episode_id)))
    low = [one for place, one in enumerate(ids) if place < 11]
    assert found(play, reward_below=11.0) == (low, 11)
    assert found(play, reward_below=11.0, limit=None) == (low, 11)
    assert found(play, reward_below=11.0, limit=4, offset=3) == (low[3:7], 11)
    assert found(play, reward_below=11.0, offset=2**70) == ([], 11)
    assert found(play, reward_min=5.0, reward_below=5.5) == ([ids[5]], 1)


def test_what_is_graded_by_step_or_by_agent_counts_as_its_trainer_counts_it(play: Play) -> None:
    results = [
        EpisodeResult(step_rewards=[0.25, 0.25]),
        EpisodeResult(agent_rewards={"a": 1.0, "b": 0.0}),
        EpisodeResult(reward=0.5, step_rewards=[9.0]),
        EpisodeResult(error=EpisodeError(type="E", message="m")),
    ]
    ids = play.register("g", size=5)
    for lease, result in zip(play.claim(4), results, strict=True):
        play.end_with(lease, result)
    assert found(play, reward_min=0.5, reward_below=0.6) == (ids[:3], 3)
    assert found(play, error="e: M") == ([ids[3]], 1)
    assert found(play, reward_below=100.0, state=EpisodeState.QUEUED) == ([], 0)


def test_tasks_are_searched_by_all_that_is_said_in_them(play: Play) -> None:
    prompt = [{"role": "user", "content": [{"type": "text", "text": "count the Cups"}]}]
    (cups,) = play.register("a")
    for name, task in (
        ("prompt", Task(id="1", environment="e", prompt=prompt)),
        ("extras", Task(id="2", environment="e", prompt=[], extras={"deep": {"list": ["CUPS", 4711]}})),
        ("name", Task(id="cups-3", environment="e", prompt=[])),
    ):
        play.board.register(OWNER, RUN, [NewGroup(group_id=name, task=task, size=1)], play.now)
    ids, total = found(play, task="cups")
    assert (len(ids), total, cups in ids) == (3, 3, False)
    assert found(play, task="4711")[1] == 1
    assert found(play, task="content")[1] == 0  # a name of a field is nothing that was said


def test_others_go_on_between_two_parts(play: Play) -> None:
    ids = [one for number in range(4) for one in play.register(f"g{number}", size=2)]
    under_way = play.board.search(OWNER, EpisodeSearch(task="hello"), limit=None)
    assert under_way.step()
    for lease in play.claim(8):
        play.end(lease)
    play.board.commit(OWNER, RUN, 3, play.now)
    play.register("later")
    while under_way.step():
        pass
    response = under_way.take()
    assert [one.episode_id for one in response] == ids  # what there was when it began
    assert [one.state for one in response] == ["queued"] * 3 + ["ended"] * 5
    assert under_way.take() == []


def test_large_tasks_and_results_are_looked_at_a_few_at_a_time(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "PART", 1000)
    monkeypatch.setattr(searching, "PART_SIZE", 1000)
    large = Task(id="t", environment="e", prompt=[], extras={"text": "x" * 600})
    groups = [NewGroup(group_id=f"g{number}", task=large, size=1) for number in range(6)]
    play.board.register(OWNER, RUN, groups, play.now)
    for lease in play.claim(6):
        play.end_with(lease, EpisodeResult(reward=1.0, metadata={"text": "y" * 600}))
    for expected in (EpisodeSearch(task="other"), EpisodeSearch(reward_min=1.0), EpisodeSearch(error="")):
        under_way = play.board.search(OWNER, expected, limit=None)
        parts = 0
        while under_way.step():
            parts += 1
        assert parts == 3
    assert found(play, task="xxx", reward_min=1.0)[1] == 6


def test_a_run_that_does_not_exist_is_no_empty_list(play: Play) -> None:
    with pytest.raises(BoardError, match="no run"):
        found(play, run="other", task="x")
    assert found(play, run=RUN, task="x") == ([], 0)
