"""Delivery: a numbered log of whole groups, read again as often as needed, forgotten by a commit and never before."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.episodes.errors import BoardError
from palestra.episodes.limits import DAY_S, EpisodeLimits
from palestra.types.episode_rows import EpisodeRow, GroupRow, Tombstone
from palestra.types.episodes import (
    EndStatus,
    EpisodeKind,
    EpisodeState,
    GroupState,
    Lease,
    OnLoss,
    PlayedGroup,
    WeightPolicy,
)
from tests.episodes.play import OWNER, RUN, Play, new_group


def played(play: Play, *names: str, **options: Any) -> list[Lease]:
    leases: list[Lease] = []
    for name in names:
        play.register(name, **options)
        for lease in play.claim(256):
            play.end(lease)
            leases.append(lease)
    return leases


def numbers(groups: list[PlayedGroup]) -> list[tuple[int, str]]:
    return [(group.number, group.group_id) for group in groups]


def test_a_reader_seeks_anywhere_from_what_is_committed() -> None:
    play = Play()
    played(play, "a", "b", "c", "d")
    assert numbers(play.delivered(limit=2)) == [(1, "a"), (2, "b")]
    assert numbers(play.delivered(after=2)) == [(3, "c"), (4, "d")]
    assert play.commit(2).committed == 2
    play.restart()
    assert numbers(play.delivered(after=3)) == [(4, "d")]
    assert numbers(play.delivered(after=2)) == [(3, "c"), (4, "d")]
    assert play.delivered(after=4) == []
    with pytest.raises(BoardError, match="groups up to 2 are committed") as error:
        play.delivered(after=1)
    assert error.value.status == 410
    with pytest.raises(BoardError, match="cursor of another run"):
        play.delivered(after=5)


def test_groups_with_listeners_of_their_own_are_committed_in_any_order() -> None:
    play = Play(max_ready=3)
    played(play, "a", "b", "c")
    play.register("d")
    assert play.claim() == []
    assert play.board.commit_one(OWNER, RUN, 2, play.now).committed == 0
    (lease,) = play.claim()  # there is room again
    play.restart()
    assert numbers(play.delivered()) == [(1, "a"), (3, "c")]
    assert numbers(play.delivered(after=1, limit=1)) == [(3, "c")]
    play.end(lease)
    assert play.board.undelivered() == [(OWNER, RUN)]
    assert play.board.commit_one(OWNER, RUN, 1, play.now).committed == 2
    assert play.board.commit_one(OWNER, RUN, 2, play.now).committed == 2
    assert play.board.commit_one(OWNER, RUN, 4, play.now).committed == 2
    assert play.board.first_member(OWNER, RUN, "d") == lease.episode_id  # committed
    assert play.board.first_member(OWNER, RUN, "e") is None
    play.restart()
    assert play.board.first_member(OWNER, RUN, "d") == lease.episode_id
    assert play.board.first_member(OWNER, RUN, "c") is not None
    assert play.commit(4).committed == 4
    assert play.board.undelivered() == []


def test_a_commit_forgets_and_never_goes_back() -> None:
    play = Play()
    leases = played(play, "a", "b")
    play.commit(1)
    assert play.commit(1) == play.commit(0) == play.run()
    assert (play.run().committed, play.run().delivered, play.run().ended) == (1, 2, 1)
    with pytest.raises(BoardError, match="the newest group of run 'r' is 2") as error:
        play.commit(3)
    assert error.value.status == 409
    with pytest.raises(BoardError) as error:
        play.info(leases[0].episode_id)
    assert error.value.status == 404
    play.restart()
    kinds = [type(row) for row in play.disk.rows.values()]
    assert (kinds.count(EpisodeRow), kinds.count(GroupRow), kinds.count(Tombstone)) == (1, 1, 2)


def test_a_repeated_end_is_known_for_a_week_after_the_commit() -> None:
    play = Play()
    (lease,) = played(play, "a")
    play.commit(1)
    for _ in range(2):
        assert play.end(lease).status is EndStatus.REPEATED
        assert play.end(lease, 2.0).status is EndStatus.CONFLICT
        assert play.beat(lease).reason.startswith("unknown")
        play.restart()
    play.wait(7 * DAY_S - 1.0)
    assert play.end(lease).status is EndStatus.REPEATED
    play.wait(1.0)
    assert play.end(lease).status is EndStatus.UNKNOWN
    play.restart()
    assert Tombstone not in map(type, play.disk.rows.values())


def test_only_so_many_are_remembered() -> None:
    play = Play(EpisodeLimits(max_remembered=4))
    leases = played(play, "a", "b", "c")
    for cursor in (1, 2, 3):
        play.commit(cursor)
        play.wait(1.0)
    play.restart()
    statuses = [play.end(lease).status for lease in leases]
    assert statuses == [EndStatus.UNKNOWN, EndStatus.REPEATED, EndStatus.REPEATED]


def test_a_committed_group_does_not_come_again_by_a_delayed_registration() -> None:
    play = Play()
    played(play, "a")
    play.commit(1)
    for _ in range(2):
        (again,) = play.board.register(OWNER, RUN, [new_group("a")], play.now)
        assert (again.is_new, again.is_committed, again.episode_ids) == (False, True, [])
        with pytest.raises(BoardError, match="differently"):
            play.register("a", 2)
        play.restart()
    assert play.claim() == []


def test_evaluations_are_delivered_the_same_way() -> None:
    play = Play()
    played(play, "a", kind=EpisodeKind.EVAL)
    (group,) = play.delivered()
    assert (group.kind, group.episodes[0].info.kind) == (EpisodeKind.EVAL, EpisodeKind.EVAL)


def stale_pair(play: Play, name: str, **options: Any) -> None:
    """A group of three: two by version 0, one by the newest."""
    play.register(name, 3, **options)
    leases = play.claim(3)
    for lease, version in zip(leases, (0, 0, None), strict=True):
        play.call(lease, version)
        play.end(lease)


def test_what_is_too_stale_for_the_trainer_is_left_out_when_it_reads() -> None:
    play = Play(weight_policy=WeightPolicy.LAG, max_lag=2)
    play.publish(2)
    stale_pair(play, "replace")
    stale_pair(play, "shrink", on_loss=OnLoss.SHRINK, min_size=1)
    stale_pair(play, "eval", kind=EpisodeKind.EVAL)
    for version in (None, 1, 2):
        assert [len(group.episodes) for group in play.delivered(version=version)] == [3, 3, 3]
    for version in (3, None):
        found = play.delivered(version=version)
        assert [(group.state, len(group.episodes)) for group in found] == [
            (GroupState.DROPPED, 1),
            (GroupState.READY, 1),
            (GroupState.READY, 3),
        ]
        assert found[0].reason == "stale_weights: for version 3 only 1 episodes are new enough, but the group needs 3"
        play.restart()
    info = play.board.episodes(OWNER, state=EpisodeState.PARKED).episodes[0]
    assert info.losses[-1].reason.startswith("stale_weights: a call was answered by version 0, the newest is 3")
    with pytest.raises(BoardError):
        play.requeue(info.episode_id)


def test_an_end_whose_result_was_left_out_later_is_still_known() -> None:
    play = Play(weight_policy=WeightPolicy.DROP)
    play.register("g")
    lease = play.claim_one()
    play.call(lease)
    play.end(lease)
    assert play.delivered(version=1)[0].state is GroupState.DROPPED
    assert play.end(lease).status is EndStatus.REPEATED
    play.commit(1)
    assert play.end(lease).status is EndStatus.REPEATED


def test_a_trainer_that_is_behind_stops_the_claims() -> None:
    play = Play(max_ready=2)
    played(play, "a", "b", "c")
    assert play.run().delivered == 2
    play.board.take_news()
    play.commit(1)
    assert play.board.take_news().claimable == {OWNER}
    play.restart()
    assert play.claim_one().group_id == "c"
