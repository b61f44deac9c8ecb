"""Large calls in parts: whoever dies in the middle, a registration is there as a whole or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.episodes import staging
from palestra.episodes.errors import BoardError
from palestra.episodes.staging import Parts
from palestra.types.episode_rows import EpisodeRow, GroupRow, RunRow
from palestra.types.episodes import NewGroup, Registered
from tests.episodes.play import OWNER, RUN, Play, new_group

GROUPS = [new_group(f"g{number}", 2, count=3) for number in range(7)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PART", 4)


def begin(play: Play, groups: list[NewGroup] = GROUPS) -> Parts[list[Registered]]:
    return play.board.register_in_parts(OWNER, RUN, groups, play.now)


def steps() -> int:
    play = Play()
    return sum(1 for _ in begin(play))


def rows(play: Play) -> list[Any]:
    """Of groups and episodes, on disk."""
    assert play.board  # saved
    return [row for row in play.disk.rows.values() if isinstance(row, GroupRow | EpisodeRow)]


def test_a_large_registration_is_as_a_small_one() -> None:
    large, small = Play(), Play()
    response = staging.at_once(begin(large))
    assert response == small.board.register(OWNER, RUN, GROUPS, small.now)
    assert large.board.episodes(OWNER).episodes == small.board.episodes(OWNER).episodes
    assert [lease.episode_id for lease in large.claim(100)] == [lease.episode_id for lease in small.claim(100)]
    again = staging.at_once(begin(large))
    assert [(one.is_new, one.episode_ids) for one in again] == [(False, one.episode_ids) for one in response]
    large.restart()
    assert large.run() == small.run()


def test_whoever_dies_in_the_middle_leaves_all_or_nothing() -> None:
    seen: set[int] = set()
    for number in range(1, steps() + 1):
        play = Play()
        play.register("before")
        parts = begin(play)
        for _ in range(number):
            next(parts)
            rows(play)
        play._board = type(play.board).restore(play.disk.load(), play.now)
        seen.add(queued := play.run().queued)
        assert queued in (1, 1 + 7 * 3)
        assert len(rows(play)) == (2 if queued == 1 else 2 + 7 * 4)  # nor is anything left on disk
        assert [one.is_new for one in staging.at_once(begin(play))] == [queued == 1] * 7
        assert play.run().queued == 1 + 7 * 3
    assert len(seen) == 2


def test_what_is_registered_after_somebody_died_in_the_middle_is_kept() -> None:
    for number in range(1, steps() + 1):
        play = Play()
        parts = begin(play)
        for _ in range(number):
            next(parts)
            rows(play)
        play._board = type(play.board).restore(play.disk.load(), play.now)
        play.register("after")
        before = play.run()
        play.restart()
        assert play.run() == before
        assert play.register("last")
        ids = [row.episode_id for row in rows(play) if isinstance(row, EpisodeRow)]
        assert len(set(ids)) == len(ids) == before.queued + 1


def test_whoever_gives_up_in_the_middle_leaves_all_or_nothing() -> None:
    seen: set[int] = set()
    for number in range(1, steps() + 1):
        play = Play()
        parts = begin(play)
        for _ in range(number):
            next(parts)
        assert play.board
        parts.close()
        seen.add(queued := play.run().queued)
        assert queued in (0, 7 * 3)
        assert len(rows(play)) == queued // 3 * 4
        before = play.run()
        play.restart()
        assert play.run() == before
    assert len(seen) == 2


def test_others_go_on_meanwhile_and_see_nothing_of_it() -> None:
    play = Play()
    play.register("before", 30)
    parts, number = begin(play), 0
    next(parts)
    while play.board.episodes(OWNER).total == 30:
        with pytest.raises(BoardError, match="large registration") as refused:
            play.register("other")
        assert (refused.value.status, refused.value.retry_after_s) == (503, 1.0)
        play.end(play.claim_one())
        play.publish(number := number + 1)
        next(parts)
    staging.at_once(parts)
    assert number > 3
    assert play.board.episodes(OWNER).total == 30 + 7 * 3
    play.restart()
    assert (play.run().version, play.run().ended) == (number, number)
    assert play.register("other")


def test_a_run_that_is_deleted_takes_it_along() -> None:
    for number in range(1, steps() + 1):
        play = Play()
        parts = begin(play)
        for _ in range(number):
            next(parts)
            rows(play)
        play.board.delete_run(OWNER, RUN, play.now)
        play.now += 1.0
        play.put_run()
        with pytest.raises(BoardError, match="was deleted meanwhile"):
            next(parts)
        assert rows(play) == []
        assert [row.created_at for row in play.disk.rows.values() if isinstance(row, RunRow)] == [play.now]
        assert play.register("g0")


@pytest.mark.parametrize(
    ("last", "status"),
    [
        (new_group("old", 2), 409),
        (new_group("g3", 5), 409),
        (new_group("x", 0), 400),
        (new_group("big", 60), 413),
        (new_group("more", 30), 429),
    ],
)
def test_what_is_refused_is_refused_as_a_whole(last: NewGroup, status: int) -> None:
    play = Play(max_queued=60)
    play.register("old", 1, count=20)
    before = len(rows(play))
    with pytest.raises(BoardError) as refused:
        staging.at_once(begin(play, [*GROUPS, last]))
    assert refused.value.status == status
    assert (len(rows(play)), play.run().queued) == (before, 20)
    assert play.register("after")


def test_a_large_commit_goes_in_parts_that_stand_for_themselves() -> None:
    play = Play()
    staging.at_once(begin(play))
    for lease in play.claim(100):
        play.end(lease)
    assert play.run().delivered == 7
    parts = play.board.commit_in_parts(OWNER, RUN, 7, play.now)
    next(parts)
    assert play.run().committed == 2
    play.restart()
    assert [group.number for group in play.delivered(after=2)] == [3, 4, 5, 6, 7]
    assert (play.commit(7).committed, len(rows(play))) == (7, 0)
    with pytest.raises(BoardError, match="the newest group"):
        play.commit(8)


def test_a_large_cancel_goes_in_parts_and_skips_what_is_over_meanwhile() -> None:
    play = Play()
    staging.at_once(begin(play))
    names = [group.group_id for group in GROUPS]
    with pytest.raises(BoardError, match="no group"):
        play.cancel(groups=(*names, "unknown"))
    assert play.run().queued == 21
    parts = play.board.cancel_in_parts(OWNER, RUN, play.now, group_ids=names)
    next(parts)
    assert play.run().queued == 21 - 2 * 3
    for lease in play.claim(3):
        play.end(lease)
    play.commit(3)
    assert staging.at_once(parts) == 6 * 3
    assert play.run().queued == 0
