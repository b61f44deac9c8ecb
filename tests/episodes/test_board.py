"""Leases: claimed once, kept by beats, fenced by the attempt, and their results taken once."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from palestra.episodes.errors import BoardError
from palestra.episodes.limits import EpisodeLimits
from palestra.types.episodes import EndStatus, EpisodeError, EpisodeResult, EpisodeState, RunSettings, WeightPolicy
from tests.episodes.play import OWNER, RUN, TASK, Play, ref

E = EndStatus
S = EpisodeState


# Claims


def test_a_claim_brings_the_task_and_all_it_takes_to_play() -> None:
    play = Play(lease_s=30.0)
    play.register("g", 2, seeds=(7,), deadline_s=500.0, tags={"split": "easy"})
    first, second = play.claim(5)
    assert (first.attempt, first.run, first.group_id, first.index, first.seed) == (1, RUN, "g", 0, 7)
    assert (first.task, first.tags, first.model, first.version) == (TASK, {"split": "easy"}, "m", 0)
    assert (first.expires_at, first.lease_s, first.deadline) == (1030.0, 30.0, 1500.0)
    assert second.index == 1
    assert second.seed != first.seed
    assert play.claim() == []


def test_no_two_clients_get_the_same_episode() -> None:
    play = Play()
    play.register("g", 100)
    claimed = [lease.episode_id for client in range(50) for lease in play.claim(3, client=f"c{client}")]
    assert len(claimed) == len(set(claimed)) == 100


def test_a_repeated_claim_gets_the_same_leases_as_far_as_they_are_open() -> None:
    play = Play(lease_s=60.0)
    play.register("g", 9)
    first = play.claim(3, claim="one")
    play.wait(50.0)
    again = play.claim(3, claim="one")
    assert [ref(lease) for lease in again] == [ref(lease) for lease in first]
    play.wait(50.0)  # the repeated claim was a beat
    play.end(first[1])
    assert [lease.index for lease in play.claim(3, claim="one")] == [0, 2]
    assert [lease.index for lease in play.claim(3, claim="two")] == [3, 4, 5]
    assert [lease.index for lease in play.claim(3, client="other", claim="one")] == [6, 7, 8]


def test_a_repeated_claim_survives_a_restart() -> None:
    play = Play()
    play.register("g", 4)
    first = play.claim(3, claim="one")
    play.end(first[0])
    play.restart()
    assert [ref(lease) for lease in play.claim(3, claim="one")] == [ref(lease) for lease in first[1:]]


def test_a_delayed_claim_whose_leases_are_over_takes_nothing() -> None:
    play = Play()
    play.register("g", 3)
    play.end(play.claim_one(claim="one"))
    with pytest.raises(BoardError, match="use a new id for each claim") as error:
        play.claim(claim="one")
    assert error.value.status == 409
    assert play.run().leased == 0


def test_a_client_holds_only_so_many_leases() -> None:
    play = Play(EpisodeLimits(max_open_leases=3))
    play.register("g", 9)
    held = play.claim(5)
    assert len(held) == 3
    with pytest.raises(BoardError, match="end or release some first") as error:
        play.claim()
    assert (error.value.status, error.value.retry_after_s) == (429, 1.0)
    assert len(play.claim(5, client="other")) == 3
    play.release(held[0])
    play.restart()
    assert len(play.claim(5)) == 1


def test_lease_lengths_are_bounded_by_the_server() -> None:
    play = Play(EpisodeLimits(min_lease_s=5.0, max_lease_s=100.0), lease_s=20.0)
    play.register("g", 3)
    assert [play.claim_one(lease_s=expected).lease_s for expected in (0.1, 1e9, None)] == [5.0, 100.0, 20.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client": "a b"}, "client_id"),
        ({"claim": "x" * 129}, "claim_id"),
        ({"most": 0}, "max_n"),
        ({"most": 257}, "max_n"),
        ({"lease_s": math.nan}, "lease_s"),
    ],
)
def test_a_claim_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    play = Play()
    with pytest.raises(BoardError, match=message) as error:
        play.claim(**options)
    assert error.value.status == 400


def test_what_is_anothers_does_not_exist() -> None:
    play = Play()
    (episode_id,) = play.register("g")
    lease = play.claim_one()
    board, now = play.board, play.now
    assert board.heartbeat("bob", "c", [ref(lease)], now)[0].reason.startswith("unknown: ")
    assert board.runs("bob") == []
    assert board.episodes("bob").total == 0
    for work in (
        lambda: board.run_info("bob", RUN),
        lambda: board.find("bob", episode_id),
        lambda: board.requeue("bob", [episode_id], now),
        lambda: board.note_call("bob", ref(lease), now),
    ):
        with pytest.raises(BoardError) as error:
            work()
        assert error.value.status == 404


# Beats and expiry


def test_a_beat_keeps_the_lease_and_silence_loses_it() -> None:
    play = Play(lease_s=60.0, backoff_s=5.0)
    (episode_id,) = play.register("g")
    lease = play.claim_one()
    for _ in range(5):
        play.wait(59.0)
        beat = play.beat(lease)
        assert (beat.can_continue, beat.reason, beat.expires_at) == (True, "", play.now + 60.0)
    play.wait(60.0)
    beat = play.beat(lease)
    assert (beat.can_continue, beat.reason) == (False, "lease_lost: expired: no heartbeat for 60 s")
    info = play.info(episode_id)
    assert (info.state, info.client_id, info.not_before) == (S.QUEUED, "", play.now + 5.0)
    assert [(loss.attempt, loss.client_id) for loss in info.losses] == [(1, "c")]


def test_a_lost_episode_comes_back_after_its_backoff_which_doubles() -> None:
    play = Play(EpisodeLimits(max_backoff_s=7.0), lease_s=1.0, backoff_s=2.0, max_attempts=10)
    play.register("g")
    for attempt, backoff in enumerate((2.0, 4.0, 7.0, 7.0), start=1):
        assert play.claim_one().attempt == attempt
        play.wait(1.0)
        play.wait(backoff - 0.01)
        assert play.claim() == []
        play.wait(0.01)


def test_next_event_is_never_late() -> None:
    play = Play(lease_s=10.0, backoff_s=3.0)
    assert play.board.next_event() is None
    play.register("g", deadline_s=100.0)
    assert play.board.next_event() == 1100.0
    lease = play.claim_one()
    assert play.board.next_event() == 1010.0
    play.wait(9.0)
    play.beat(lease)
    play.wait(1.0)
    assert play.board.next_event() == 1019.0
    play.wait(9.0)
    assert play.board.next_event() == 1022.0
    play.wait(3.0)
    play.end(play.claim_one())
    assert play.board.next_event() is None


def test_only_who_holds_the_lease_is_heard() -> None:
    play = Play(lease_s=10.0)
    play.register("g")
    lease = play.claim_one()
    assert play.beat(lease, client="other").reason == "lease_lost: another client holds it"
    assert play.end(lease, client="other").status is E.LEASE_LOST
    assert play.board.release(OWNER, "other", [ref(lease)], "", play.now)[0].reason.startswith("lease_lost")
    assert play.beat(lease, client=None).can_continue  # the attempt's own key
    assert play.end(lease, client=None).status is E.ACCEPTED


def test_an_episode_that_is_lost_too_often_is_parked_with_its_reasons() -> None:
    play = Play(lease_s=1.0, max_attempts=2)
    (episode_id,) = play.register("g", on_loss="drop")
    play.lose()
    play.lose()
    info = play.info(episode_id)
    assert (info.state, info.attempt) == (S.PARKED, 2)
    assert [loss.reason for loss in info.losses] == ["expired: no heartbeat for 1 s"] * 2
    assert play.run().parked == 1


def test_what_is_given_back_is_queued_again_after_a_while_and_not_for_ever() -> None:
    play = Play(EpisodeLimits(max_losses=4), backoff_s=2.0, max_attempts=1)
    (episode_id,) = play.register("g", on_loss="drop")
    for number in range(1, 4):
        play.release(play.claim_one(), "no such tool\0")
        assert (play.info(episode_id).state, play.claim()) == (S.QUEUED, [])
        assert play.board.next_event() == play.now + 2.0, number
        play.wait(2.0)
    play.release(play.claim_one(), "no such tool")
    info = play.info(episode_id)
    assert (info.state, info.attempt) == (S.PARKED, 4)
    assert [loss.reason for loss in info.losses] == ["released: no such tool"] * 4


def test_a_released_episode_goes_to_somebody_else_without_waiting_for_the_lease() -> None:
    play = Play(backoff_s=0.0)
    play.register("g")
    lease = play.claim_one()
    assert play.release(lease, "shutting down").reason == "lease_lost: released: shutting down"
    assert play.release(lease).reason == "lease_lost: released: shutting down"
    assert play.claim_one(client="other").attempt == 2
    assert play.end(lease).status is E.LEASE_LOST


def test_a_clock_that_goes_backwards_breaks_nothing() -> None:
    play = Play(lease_s=60.0, backoff_s=1.0)
    play.register("g", 2)
    first, second = play.claim(2)
    play.wait(-500.0)
    assert play.beat(first).can_continue
    play.wait(60.0)  # for the first one, who has beaten since
    assert not play.beat(first).can_continue
    assert play.end(second).status is E.ACCEPTED
    play.wait(-1000.0)
    play.restart()
    play.wait(1061.0)
    assert play.claim_one().attempt == 2


# Ends


def test_an_end_is_taken_once_and_repeated_as_often_as_it_is_sent() -> None:
    play = Play()
    (episode_id,) = play.register("g")
    lease = play.claim_one()
    assert play.end(lease, 0.5).status is E.ACCEPTED
    assert play.end(lease, 0.5).status is E.REPEATED
    assert play.end(lease, 0.6).status is E.CONFLICT
    play.restart()
    assert play.end(lease, 0.5).status is E.REPEATED
    assert play.end(lease, 0.6).status is E.CONFLICT
    info = play.info(episode_id)
    assert (info.state, info.client_id, info.ended_at) == (S.ENDED, "c", play.now)
    assert info.result == EpisodeResult(reward=0.5)
    assert play.beat(lease).reason == "lease_lost: this attempt has ended"


def test_the_same_result_is_the_same_however_it_is_written() -> None:
    play = Play()
    play.register("g")
    lease = play.claim_one()
    play.end_with(lease, EpisodeResult(reward=1, metrics={"a": 1, "b": 2}, metadata={"x": {"k": 1, "l": [1]}}))
    again = EpisodeResult(reward=1.0, metrics={"b": 2.0, "a": 1.0}, metadata={"x": {"l": [1], "k": 1}})
    assert play.end_with(lease, again).status is E.REPEATED


def test_a_late_end_never_counts_whoever_plays_now() -> None:
    play = Play(lease_s=10.0, backoff_s=0.0)
    (episode_id,) = play.register("g")
    late = play.claim_one()
    play.wait(10.0)
    assert play.end(late, 9.0).status is E.LEASE_LOST  # nobody else has it yet
    lease = play.claim_one(client="d")
    assert play.end(late, 9.0).status is E.LEASE_LOST
    assert play.end(lease, 1.0, client="d").status is E.ACCEPTED
    assert play.end(late, 1.0).status is E.LEASE_LOST
    found = play.info(episode_id)
    assert (found.attempt, found.result) == (2, EpisodeResult(reward=1.0))


def test_an_attempt_that_was_never_given_cannot_end() -> None:
    play = Play()
    play.register("g")
    lease = play.claim_one()
    assert play.end(replace(lease, attempt=2)).detail.startswith("lease_lost: attempt 2 was never leased")
    assert play.end(replace(lease, episode_id="nobody")).status is E.UNKNOWN


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (EpisodeResult(), "no reward"),
        (EpisodeResult(reward=math.nan), "finite"),
        (EpisodeResult(reward=1.0, step_rewards=[math.inf]), "finite"),
        (EpisodeResult(agent_rewards={"a": -math.inf}), "finite"),
        (EpisodeResult(reward=1.0, metrics={"m": math.nan}), "finite"),
        (EpisodeResult(reward=1.0, metadata={"x": object()}), "JSON"),
        (EpisodeResult(reward=1.0, metadata={"x": "\ud800"}), "JSON"),
        (EpisodeResult(reward=1.0, metadata={"x": "y" * 2000}), "at most 1000 bytes"),
    ],
)
def test_a_result_is_checked_before_it_is_taken_and_the_lease_stays(result: EpisodeResult, message: str) -> None:
    play = Play(EpisodeLimits(max_result_bytes=1000))
    play.register("g")
    lease = play.claim_one()
    ended = play.end_with(lease, result)
    assert ended.status is E.INVALID
    assert message in ended.detail
    assert play.end(lease).status is E.ACCEPTED


def test_failures_and_rewards_by_step_or_agent_are_results() -> None:
    play = Play()
    play.register("g", 3)
    results = [
        EpisodeResult(error=EpisodeError(type="ToolError", message="broke")),
        EpisodeResult(step_rewards=[0.0, 1.0]),
        EpisodeResult(agent_rewards={"a": 1.0, "b": 0.0}),
    ]
    for lease, result in zip(play.claim(3), results, strict=True):
        assert play.end_with(lease, result).status is E.ACCEPTED
    (group,) = play.delivered()
    assert [played.info.result for played in group.episodes] == results


# Model calls, weights, pauses


def test_a_lease_does_not_age_while_one_of_its_calls_runs() -> None:
    play = Play(lease_s=10.0)
    (episode_id,) = play.register("g")
    lease = play.claim_one()
    play.call(lease)
    play.call(lease)
    play.wait(1000.0)
    assert play.info(episode_id).expires_at is None
    play.call_over(lease)
    play.wait(1000.0)
    play.call_over(lease)
    play.wait(9.0)
    assert (play.info(episode_id).calls, play.beat(lease).can_continue) == (2, True)
    play.call_over(lease)  # nobody knows of this one
    play.wait(10.0)
    with pytest.raises(BoardError) as error:
        play.call(lease)
    assert (error.value.status, error.value.code) == (409, "lease_lost")


def test_calls_that_run_while_the_board_is_read_again_keep_their_leases() -> None:
    play = Play(lease_s=10.0)
    play.register("g", 2)
    first, second = play.claim(2)
    play.call(first)
    play.restart(keep_calls=True)
    play.wait(100.0)
    assert (play.beat(first).can_continue, play.beat(second).can_continue) == (True, False)
    play.call_over(first)
    play.wait(10.0)
    assert not play.beat(first).can_continue


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        ({"weight_policy": WeightPolicy.FINISH}, None),
        ({"weight_policy": WeightPolicy.LAG, "max_lag": 2}, 2),
        ({"weight_policy": WeightPolicy.DROP}, 0),
    ],
)
def test_an_episode_is_lost_when_its_oldest_call_is_too_old(settings: dict[str, Any], last: int | None) -> None:
    play = Play(**settings)
    (episode_id, _) = play.register("g", 2)
    lease, without_calls = play.claim(2)
    assert play.call(lease) == 0
    for version in range(1, 5):
        play.publish(version)
        is_on = last is None or version <= last
        assert play.beat(lease).can_continue is is_on
        assert play.beat(without_calls).can_continue
        if is_on:
            assert play.call(lease) == version
    if last is None:
        assert play.end(lease).status is E.ACCEPTED
        assert (play.info(episode_id).version, play.info(episode_id).oldest_version) == (0, 0)
        return
    ended = play.end(lease)
    assert (ended.status, ended.detail[:14]) == (E.STALE, "stale_weights:")
    with pytest.raises(BoardError) as error:
        play.call(lease)
    assert error.value.code == "stale_weights"
    again = play.claim_one()  # at once, on the newest weights
    assert (again.episode_id, again.attempt, again.version, again.model) == (episode_id, 2, 4, "m4")


def test_going_stale_does_not_count_towards_parking_until_it_never_ends() -> None:
    play = Play(EpisodeLimits(max_losses=4), weight_policy=WeightPolicy.DROP, max_attempts=2)
    (episode_id,) = play.register("g", on_loss="drop")
    for version in range(1, 5):
        play.call(play.claim_one())
        play.publish(version)
    assert play.info(episode_id).state is S.PARKED
    assert play.delivered()[0].state == "dropped"


def test_a_stricter_policy_holds_at_once_and_a_call_on_old_weights_is_refused() -> None:
    play = Play()
    play.register("g", 2)
    lease, other = play.claim(2)
    play.call(lease)
    play.publish(3)
    play.put_run(weight_policy=WeightPolicy.LAG, max_lag=1)
    assert play.beat(lease).reason.startswith("stale_weights: ")
    with pytest.raises(BoardError) as error:
        play.call(other, version=1)
    assert (error.value.status, error.value.code) == (409, "stale_weights")
    assert play.call(other, version=2) == 2
    play.publish(4)
    assert play.beat(other).reason.startswith("stale_weights: ")


def test_versions_only_rise_and_the_same_again_changes_nothing() -> None:
    play = Play()
    assert (play.publish(3).version, play.publish(3).model) == (3, "m3")
    for version, model in ((2, "m2"), (3, "other")):
        with pytest.raises(BoardError, match="continues with 4") as error:
            play.board.publish(OWNER, RUN, play.now, version=version, model=model)
        assert error.value.status == 409


def test_a_run_without_a_model_gets_its_first_one_as_version_zero_or_later() -> None:
    play = Play()
    play.board.put_run(OWNER, "new", play.now)
    first = play.board.publish(OWNER, "new", play.now, version=0, model="m")
    assert (first.version, first.model) == (0, "m")
    with pytest.raises(BoardError):
        play.board.publish(OWNER, "new", play.now, version=0, model="other")


def test_nothing_ages_and_nothing_is_claimed_while_a_run_is_paused() -> None:
    play = Play(lease_s=60.0)
    (first_id, _, _) = play.register("g", 3)
    first, second = play.claim(2)
    play.wait(50.0)
    play.pause()
    play.wait(5000.0)
    assert play.claim() == []
    assert play.info(first_id).expires_at is None
    assert play.beat(second).can_continue
    with pytest.raises(BoardError) as error:
        play.call(first)
    assert (error.value.status, error.value.code, error.value.retry_after_s) == (503, "paused", 1.0)
    play.pause()
    play.wait(100.0)
    play.resume()
    assert play.info(first_id).expires_at == play.now + 10.0
    play.resume()
    play.wait(10.0)
    assert (play.beat(first).can_continue, play.beat(second).can_continue) == (False, True)
    assert len(play.claim(5)) == 1


def test_ends_are_taken_while_paused_and_a_call_may_outlast_the_pause() -> None:
    play = Play(lease_s=10.0)
    play.register("g", 2)
    first, second = play.claim(2)
    play.call(second)
    play.pause()
    assert play.end(first).status is E.ACCEPTED
    play.resume()
    play.wait(100.0)
    assert play.beat(second).can_continue
    play.pause()
    play.call_over(second)
    play.restart()
    play.wait(100.0)
    play.resume()
    play.wait(9.0)
    assert play.beat(second).can_continue


# Restart


def test_leases_begin_anew_when_the_server_was_away() -> None:
    play = Play(lease_s=60.0)
    play.register("g", 2)
    (lease,) = play.claim()
    play.wait(50.0)
    play.now += 100_000.0  # nobody could beat
    play.restart()
    play.wait(59.0)
    assert play.end(lease).status is E.ACCEPTED
    assert play.board.leases() == []


def test_a_clock_that_was_set_back_over_a_restart_holds_nothing_up() -> None:
    play = Play(lease_s=10.0, backoff_s=5.0)
    play.register("g")
    play.claim()
    play.wait(10.0)
    play.now -= 100_000.0
    play.restart()
    play.wait(EpisodeLimits().max_backoff_s)
    assert play.claim_one().attempt == 2


def test_news_say_who_should_look_again_and_which_keys_are_void() -> None:
    play = Play(lease_s=10.0, backoff_s=5.0)
    play.register("g")
    assert play.board.take_news().claimable == {OWNER}
    lease = play.claim_one()
    assert play.board.take_news().claimable == set()
    play.wait(10.0)
    news = play.board.take_news()
    assert ([(one.client_id, one.ref) for one in news.over], news.claimable) == ([("c", ref(lease))], set())
    play.wait(5.0)
    assert play.board.take_news().claimable == {OWNER}
    play.end(play.claim_one())
    news = play.board.take_news()
    assert (news.delivered, [one.ref.attempt for one in news.over]) == ({(OWNER, RUN)}, [2])


# Runs


@pytest.mark.parametrize(
    "settings",
    [
        {"share": 0.0},
        {"share": math.nan},
        {"max_lag": -1},
        {"lease_s": 0.0},
        {"max_attempts": 0},
        {"backoff_s": -1.0},
        {"backoff_s": math.inf},
        {"max_queued": 0},
        {"max_ready": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    play = Play()
    with pytest.raises(BoardError, match=next(iter(settings))) as error:
        play.put_run(**settings)
    assert error.value.status == 400
    assert play.run().settings == RunSettings()


def test_a_run_is_made_once_and_changed_by_what_is_given() -> None:
    play = Play(share=2.0)
    board = play.board
    assert board.put_run(OWNER, RUN, play.now).settings.share == 2.0
    assert board.put_run(OWNER, RUN, play.now, model="m2").model == "m2"
    changed = board.put_run(OWNER, RUN, play.now, settings=RunSettings(share=3.0))
    assert (changed.settings.share, changed.model) == (3.0, "m2")
    play.restart()
    assert play.run() == changed
    for run, model in (("a b", "m"), ("", "m"), ("x", "a\0b"), ("x", "")):
        with pytest.raises(BoardError):
            play.board.put_run(OWNER, run, play.now, model=model)
    assert [info.run for info in play.board.runs(OWNER)] == [RUN]


def test_episodes_are_listed_in_the_order_of_registration() -> None:
    play = Play()
    ids = [*play.register("b", 2), *play.register("a", 2)]
    play.end(play.claim_one())
    for _ in range(2):
        listing = play.board.episodes(OWNER, run=RUN)
        assert ([info.episode_id for info in listing.episodes], listing.total) == (ids, 4)
        page = play.board.episodes(OWNER, state=S.QUEUED, limit=2, offset=1)
        assert ([info.episode_id for info in page.episodes], page.total) == (ids[2:], 3)
        play.restart()
