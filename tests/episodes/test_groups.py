"""Groups: whole or dropped, by their own rules about lost members."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.episodes.errors import BoardError
from palestra.episodes.limits import EpisodeLimits
from palestra.types.episodes import EndStatus, EpisodeState, GroupState, OnLoss
from tests.episodes.play import OWNER, RUN, TASK, Play, new_group

S = EpisodeState


def states(play: Play, ids: list[str]) -> list[str]:
    return [play.info(episode_id).state.value for episode_id in ids]


def members(play: Play) -> list[str]:
    return [info.episode_id for info in play.board.episodes(OWNER).episodes]


# Registration


def test_registering_the_same_again_changes_nothing_and_a_different_one_is_refused() -> None:
    play = Play()
    ids = play.register("g", 2)
    again, other = play.board.register(OWNER, RUN, [new_group("g", 2), new_group("h")], play.now + 5)
    assert (again.episode_ids, again.is_new, again.is_committed) == (ids, False, False)
    assert (len(other.episode_ids), other.is_new) == (1, True)
    play.restart()
    with pytest.raises(BoardError, match="'g' of run 'r' was registered differently before") as error:
        play.board.register(OWNER, RUN, [new_group("new"), new_group("g", 3)], play.now)
    assert error.value.status == 409
    assert play.run().queued == 3  # of the batch nothing


def test_one_batch_may_name_a_group_twice_but_not_in_two_ways() -> None:
    play = Play()
    first, second = play.board.register(OWNER, RUN, [new_group("g"), new_group("g")], play.now)
    assert (first.is_new, second.is_new, first.episode_ids) == (True, False, second.episode_ids)
    with pytest.raises(BoardError, match="differently"):
        play.board.register(OWNER, RUN, [new_group("h"), new_group("h", 2)], play.now)
    assert play.run().queued == 1


def test_ids_and_seeds_are_made_by_hash_and_ids_never_come_again() -> None:
    one, two = Play(), Play()
    assert one.register("g", 3) == two.register("g", 3)
    seeds = [one.info(episode_id).seed for episode_id in members(one)]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**53 for seed in seeds)
    two.put_run("other")
    assert not set(two.register("g", 3, run="other")) & set(members(one))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_id": "a b"}, "group_id"),
        ({"size": 0}, "size"),
        ({"size": 3, "count": 2}, "never complete"),
        ({"count": 99}, "at most 50"),
        ({"size": 2, "min_size": 3}, "min_size"),
        ({"min_size": 0}, "min_size"),
        ({"seeds": (1, 2)}, "seeds"),
        ({"seeds": (2**63,)}, "seeds"),
        ({"priority": 2**31}, "priority"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"tags": {"x": "y" * 2000}}, "at most 1500 bytes"),
        ({"tags": {"x": "\ud800"}}, "JSON"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused_with_its_whole_batch(options: dict[str, Any], message: str) -> None:
    play = Play(EpisodeLimits(max_members=50, max_task_bytes=1500))
    with pytest.raises(BoardError, match=message) as error:
        play.board.register(OWNER, RUN, [new_group("fine"), new_group(**options)], play.now)
    assert error.value.status in (400, 413)
    assert play.run().queued == 0


def test_a_full_queue_says_when_to_come_again() -> None:
    play = Play(max_queued=3)
    play.register("a", 2)
    with pytest.raises(BoardError, match="has 2 episodes queued of at most 3") as error:
        play.register("b", 2)
    assert (error.value.status, error.value.retry_after_s) == (429, 1.0)
    with pytest.raises(BoardError, match="register fewer") as error:
        play.register("c", 4)
    assert error.value.status == 413
    play.claim()
    play.register("b", 2)
    with pytest.raises(BoardError, match=r"no run .other.; PUT /episodes/v1/runs/") as error:
        play.register("b", 2, run="other")
    assert error.value.status == 404


# Whole


def test_a_group_is_delivered_when_it_is_whole() -> None:
    play = Play()
    play.register("g", 3, tags={"a": "b"})
    leases = play.claim(3)
    for lease in leases[:2]:
        play.end(lease)
    assert play.delivered() == []
    play.end(leases[2], 7.0)
    (group,) = play.delivered()
    assert (group.number, group.group_id, group.task, group.state, group.reason) == (1, "g", TASK, "ready", "")
    assert group.tags == {"a": "b"}
    assert [(one.info.index, one.info.attempt, one.trajectories) for one in group.episodes] == [
        (0, 1, []),
        (1, 1, []),
        (2, 1, []),
    ]


def test_oversampling_stops_early_and_the_rest_hears_of_it() -> None:
    play = Play()
    ids = play.register("g", 2, count=5)
    leases = play.claim(4)
    play.end(leases[3])
    play.end(leases[1])
    assert states(play, ids) == ["cancelled", "ended", "cancelled", "ended", "cancelled"]
    beat = play.beat(leases[0])
    assert (beat.can_continue, beat.reason) == (False, "cancelled: its group is complete")
    assert play.end(leases[2]).status is EndStatus.CANCELLED
    assert play.claim() == []
    (group,) = play.delivered()
    assert [one.info.index for one in group.episodes] == [1, 3]


# Lost members


def test_a_lost_member_is_replaced_by_another_of_the_same_task_before_later_groups() -> None:
    play = Play(lease_s=1.0, max_attempts=1)
    ids = play.register("g", 2, seeds=(5, 6))
    play.register("later")
    play.lose()
    assert play.info(ids[0]).state is S.PARKED
    leases = play.claim(3)
    assert [(lease.group_id, lease.index) for lease in leases] == [("g", 1), ("g", 2), ("later", 0)]
    assert leases[1].seed not in (5, 6)
    assert leases[1].task == TASK
    for lease in leases[:2]:
        play.end(lease)
    (group,) = play.delivered()
    assert [one.info.index for one in group.episodes] == [1, 2]


def test_a_task_that_nobody_can_play_ends_in_a_dropped_group() -> None:
    play = Play(lease_s=1.0, max_attempts=1)
    play.register("g", 2)
    play.end(play.claim_one())
    play.lose(3)
    (group,) = play.delivered()
    assert group.state is GroupState.DROPPED
    assert group.reason == "lost: 1 of 2 episodes are left, but the group needs 2"
    assert [one.info.index for one in group.episodes] == [0]
    assert [info.state for info in play.board.episodes(OWNER).episodes] == [S.ENDED, *[S.PARKED] * 3]


def test_a_shrinking_group_goes_on_with_fewer_down_to_its_least() -> None:
    play = Play(lease_s=1.0, max_attempts=1)
    play.register("g", 4, on_loss=OnLoss.SHRINK)
    play.register("h", 4, on_loss=OnLoss.SHRINK, min_size=3)
    play.end(play.claim_one())
    play.lose()
    assert play.delivered() == []
    play.end(play.claim_one())
    play.lose()
    (small,) = play.delivered()
    assert [one.info.index for one in small.episodes] == [0, 2]
    play.lose(2)
    dropped = play.delivered()[1]
    assert (dropped.state, dropped.reason) == (
        GroupState.DROPPED,
        "lost: 2 of 4 episodes are left, but the group needs 3",
    )
    assert play.run().queued == 0


def test_a_group_of_one_shrinks_to_nothing() -> None:
    play = Play(lease_s=1.0, max_attempts=1)
    play.register("g", 1, on_loss=OnLoss.SHRINK)
    play.lose()
    assert play.delivered()[0].state is GroupState.DROPPED


def test_what_was_played_too_much_makes_up_for_what_is_lost() -> None:
    play = Play(lease_s=1.0, max_attempts=1)
    for group_id, on_loss in (("a", OnLoss.DROP), ("b", OnLoss.REPLACE), ("c", OnLoss.SHRINK)):
        play.register(group_id, 1, count=2, on_loss=on_loss)
        play.lose()
        play.end(play.claim_one())
    assert [(group.state, len(group.episodes)) for group in play.delivered()] == [(GroupState.READY, 1)] * 3
    assert len(members(play)) == 6


def test_a_group_that_drops_does_so_at_the_first_loss_and_tells_the_others() -> None:
    play = Play(lease_s=10.0, max_attempts=1)
    ids = play.register("g", 3, on_loss=OnLoss.DROP)
    play.claim_one(lease_s=1.0)
    second = play.claim_one()
    play.wait(1.0)
    assert play.beat(second).reason == (
        "cancelled: its group was dropped (lost: 2 of 3 episodes are left, but the group needs 3)"
    )
    assert states(play, ids) == ["parked", "cancelled", "cancelled"]
    assert [group.state for group in play.delivered()] == [GroupState.DROPPED]


def test_after_its_deadline_a_group_takes_what_it_has_or_is_dropped() -> None:
    play = Play(lease_s=1000.0)
    ids = play.register("a", 3, deadline_s=100.0, on_loss=OnLoss.SHRINK)
    play.register("b", 3, deadline_s=100.0)
    leases = play.claim(4)
    for lease in leases[:2]:
        play.end(lease)
    play.restart()
    play.wait(100.0)
    small, dropped = play.delivered()
    assert (small.state, len(small.episodes)) == (GroupState.READY, 2)
    assert (dropped.state, dropped.reason) == (
        GroupState.DROPPED,
        "deadline: 0 of 3 episodes are left, but the group needs 3",
    )
    assert states(play, ids) == ["ended", "ended", "parked"]
    assert play.beat(leases[2]).reason == "deadline: the group's deadline of 100 s has passed"
    assert play.end(leases[3]).status is EndStatus.LEASE_LOST
    with pytest.raises(BoardError, match="only parked episodes of open groups") as error:
        play.requeue(ids[2])
    assert error.value.status == 409


# Decided by people


def test_a_cancelled_group_is_delivered_as_dropped_and_its_players_hear_of_it() -> None:
    play = Play(lease_s=1.0, max_attempts=1)
    ids = play.register("g", 4)
    play.register("h")
    play.end(play.claim_one())
    play.lose()  # replaced by a fifth
    lease = play.claim_one()
    assert play.cancel(groups=("g",), reason="too easy") == 4
    assert states(play, ids) == ["ended", "cancelled", "cancelled", "cancelled"]
    assert play.beat(lease).reason == "cancelled: too easy"
    assert play.end(lease).status is EndStatus.CANCELLED
    (group,) = play.delivered()
    assert (group.state, group.reason, len(group.episodes)) == (GroupState.DROPPED, "cancelled: too easy", 1)
    assert play.cancel(*ids, groups=("g",)) == 0
    assert play.claim_one().group_id == "h"


def test_a_cancelled_member_is_a_lost_one() -> None:
    play = Play()
    ids = play.register("a", 2)
    assert play.cancel(ids[0]) == 1
    assert [lease.index for lease in play.claim(5)] == [1, 2]
    ids = play.register("b", 3, on_loss=OnLoss.SHRINK)
    assert play.cancel(*ids[:2]) == 2
    assert play.delivered()[0].reason == "cancelled: 1 of 3 episodes are left, but the group needs 2"


def test_what_is_cancelled_must_be_known() -> None:
    play = Play()
    ids = play.register("g", 2)
    play.put_run("other")
    foreign = play.register("g", run="other")
    for groups in (("none",), ("g", "none")):
        with pytest.raises(BoardError) as error:
            play.cancel(ids[0], groups=groups)
        assert error.value.status == 404
    with pytest.raises(BoardError, match="it belongs to 'other'"):
        play.cancel(*foreign)
    assert play.run().queued == 2


def test_a_requeued_episode_has_all_its_attempts_again_and_their_numbers_go_on() -> None:
    play = Play(lease_s=1.0, max_attempts=2)
    (first, second) = play.register("g", 2, on_loss=OnLoss.SHRINK, min_size=1)
    for _ in range(2):
        play.lose(2)
        assert play.info(first).state is S.PARKED
        assert play.requeue(first, first) == 1
        assert play.info(first).state is S.QUEUED
        play.restart()
    assert [loss.attempt for loss in play.info(first).losses] == [1, 2, 3, 4]
    lease = play.claim_one()
    assert (lease.episode_id, lease.attempt) == (first, 5)
    with pytest.raises(BoardError) as error:
        play.requeue(first)
    assert error.value.status == 409
    with pytest.raises(BoardError) as error:
        play.requeue("nobody")
    assert error.value.status == 404
    play.end(lease)
    play.end(play.claim_one())
    (group,) = play.delivered()
    assert [one.info.episode_id for one in group.episodes] == [first, second]
