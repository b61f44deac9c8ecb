"""A run that is deleted goes with everything of it, and its name begins anew."""

from __future__ import annotations

import pytest

from palestra.episodes.errors import BoardError
from palestra.types.episodes import EndStatus, Lease
from tests.episodes.play import OWNER, RUN, Play, ref

E = EndStatus


def delete(play: Play, run: str = RUN, owner: str = OWNER) -> int:
    return play.board.delete_run(owner, run, play.now)


def code(play: Play, lease: Lease) -> str:
    with pytest.raises(BoardError) as refused:
        play.call(lease)
    return refused.value.code


def make_play() -> tuple[Play, Lease, Lease, Lease]:
    """With a committed, an ended and a leased episode, one in back-off, one that waits, and a deadline."""
    play = Play(backoff_s=5.0)
    play.register("committed")
    play.register("ended")
    play.register("open", 3, deadline_s=50.0)
    committed, ended, leased, lost = play.claim(4)
    play.end(committed)
    play.end(ended)
    play.commit(1)
    play.release(lost)
    return play, committed, ended, leased


@pytest.mark.parametrize("does_restart", [False, True])
def test_nothing_of_a_deleted_run_is_left_and_players_are_told(does_restart: bool) -> None:
    play, committed, ended, leased = make_play()
    play.board.take_news()
    assert delete(play) == 4
    news = play.board.take_news()
    assert ([lease.ref for lease in news.over], news.deleted) == ([ref(leased)], {(OWNER, RUN)})
    assert (news.delivered, news.claimable) == (set(), {OWNER})
    if does_restart:
        play.restart()
    assert (play.board.runs(OWNER), play.board.episodes(OWNER).total, play.board.leases()) == ([], 0, [])
    assert (delete(play), play.board.next_event()) == (0, None)
    assert play.claim() == []
    with pytest.raises(BoardError, match="no run"):
        play.delivered()
    assert play.beat(leased).reason == "cancelled: its run was deleted"
    assert (play.end(leased).status, code(play, leased)) == (E.CANCELLED, "cancelled")
    assert [play.end(one).status for one in (committed, ended)] == [E.REPEATED] * 2
    assert play.end(ended, reward=0.5).status is E.CONFLICT
    play.wait(100.0)
    assert play.board.runs(OWNER) == []


@pytest.mark.parametrize("does_restart", [False, True])
def test_its_name_begins_anew(does_restart: bool) -> None:
    play, committed, ended, leased = make_play()
    assert delete(play) == 4
    play.wait(1e-6)
    info = play.put_run(backoff_s=0.0)
    assert (info.version, info.committed, info.delivered) == (0, 0, 0)
    fresh = [*play.register("committed"), *play.register("open", 2)]
    if does_restart:
        play.restart()
        assert play.register("open", 2) == fresh[1:]
    old = {one.episode_id for one in (committed, ended, leased)}
    assert (len(set(fresh)), old & set(fresh)) == (3, set())
    play.end(play.claim_one())
    assert [(group.number, group.group_id) for group in play.delivered()] == [(1, "committed")]
    assert play.end(committed).status is E.REPEATED
    assert play.end(leased).status is E.CANCELLED


def test_another_owners_run_of_the_same_name_stays() -> None:
    play, *_ = make_play()
    play.put_run(owner="bob")
    assert delete(play, owner="carol") == 0
    assert delete(play) == 4
    assert [info.run for info in play.board.runs("bob")] == [RUN]


def test_a_run_that_delivers_in_the_moment_it_is_deleted_tells_only_the_latter() -> None:
    play = Play()
    play.register("g", 2, deadline_s=10.0)
    play.now += 10.0
    assert delete(play) == 2
    news = play.board.take_news()
    assert (news.delivered, news.deleted) == (set(), {(OWNER, RUN)})


def test_a_deleted_run_has_no_engine() -> None:
    """Whoever is being told of it just then is told all the same."""
    play = Play()
    play.board.note_engine(OWNER, RUN, "m")
    assert play.board.engine_of(OWNER, RUN) == "m"
    play.board.delete_run(OWNER, RUN, play.now)
    assert play.board.engine_of(OWNER, RUN) == ""
