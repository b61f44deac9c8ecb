"""The board against a model of it: whatever happens in whatever order, restarts included, both say the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from palestra.episodes import staging
from palestra.episodes.board import EpisodeBoard
from palestra.episodes.errors import BoardError
from palestra.episodes.limits import EpisodeLimits
from palestra.types.episodes import (
    ClaimRequest,
    EndRequest,
    EndStatus,
    EpisodeInfo,
    EpisodeKind,
    EpisodeResult,
    EpisodeState,
    LeaseRef,
    NewGroup,
    OnLoss,
    RunSettings,
    WeightPolicy,
)
from tests.episodes.model import MEpisode, MGroup, Model, MRun, Place
from tests.episodes.play import OWNER, TASK, Disk

K = EpisodeKind
S = EpisodeState
LIMITS = EpisodeLimits(max_losses=3, max_open_leases=10_000)
CLIENTS = st.sampled_from(["c1", "c2"])
PICK = st.integers(0, 7)
RUNS = st.sampled_from(["a", "a", "b"])
SHARES = [1.0, 1.0, 0.5, 0.34]
ENVIRONMENTS = ["x", "y", "z"]
WEIGHTS: list[dict[str, float]] = [{}, {"x": 3.0}, {"x": 0.5, "y": 2.0}]
SELDOM = st.sampled_from([False, False, False, False, True])


class BoardMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.board, self.disk, self.model = EpisodeBoard(LIMITS), Disk(), Model(LIMITS.max_losses)
        self.ids: dict[str, Place] = {}
        self.given: list[tuple[str, int, str]] = []
        """Leases ever: id, attempt, client."""
        self.claimed: list[tuple[str, str]] = []
        self.specs: list[tuple[str, NewGroup]] = []
        self.made = 0
        """Groups ever."""
        self.seen: dict[str, tuple[int, str]] = {}
        """Attempt and state at the last look."""

    @initialize(
        policy=st.sampled_from(WeightPolicy),
        lease_s=st.sampled_from([3.0, 10.0]),
        backoff_s=st.sampled_from([0.0, 2.0]),
        max_attempts=st.integers(1, 4),
        eval_first=st.booleans(),
        share=st.sampled_from(SHARES),
        weights=st.sampled_from(WEIGHTS),
    )
    def begin(
        self,
        policy: WeightPolicy,
        lease_s: float,
        backoff_s: float,
        max_attempts: int,
        eval_first: bool,
        share: float,
        weights: dict[str, float],
    ) -> None:
        self.lease_s, self.max_attempts = lease_s, max_attempts
        for name in ("a", "b"):
            self.model.runs[name] = MRun(name, policy, 1, backoff_s, eval_first, share, tuple(weights))
            given: dict[str, Any] = {"weight_policy": policy, "lease_s": lease_s, "backoff_s": backoff_s}
            given |= {"client_share": share, "environment_weights": weights}
            settings = RunSettings(**given, max_lag=1, max_attempts=max_attempts, eval_first=eval_first)
            self.settings = settings
            self.board.put_run(OWNER, name, self.now, settings=settings, model="m")
        self.register("a", 2, 1, None, "x", on_loss=OnLoss.REPLACE, kind=K.TRAIN, priority=0, deadline_s=None)
        self.claim("a", None, 2, "c1", False)

    # The trainer

    @rule(
        run=RUNS,
        size=st.integers(1, 3),
        extra=st.integers(0, 1),
        on_loss=st.sampled_from(OnLoss),
        kind=st.sampled_from([K.TRAIN, K.TRAIN, K.EVAL]),
        priority=st.integers(0, 1),
        deadline_s=st.sampled_from([None, None, 12.0]),
        attempts=st.sampled_from([None, 1]),
        environment=st.sampled_from(ENVIRONMENTS),
    )
    def register(self, run: str, size: int, extra: int, attempts: int | None, environment: str, **options: Any) -> None:
        task = replace(TASK, environment=environment)
        new = self.new_group(task=task, size=size, count=size + extra, max_attempts=attempts, **options)
        (made,) = self.board.register(OWNER, run, [new], self.now)
        self.model.tick(self.now)
        assert made.is_new
        assert len(made.episode_ids) == size + extra
        self.begun(run, new)

    @rule(run=RUNS, sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), steps=st.integers(1, 9))
    def register_in_parts_and_die(self, run: str, sizes: list[int], steps: int) -> None:
        """What was registered is there as a whole, or not at all."""
        new = [self.new_group(task=TASK, size=size) for size in sizes]
        parts = self.board.register_in_parts(OWNER, run, new, self.now)
        self.model.tick(self.now)
        with patch.object(staging, "PART", 1), suppress(StopIteration):
            for _ in range(steps):
                next(parts)
                self.disk.save(self.board)
        self.disk.save(self.board)
        self.restart(keep_calls=False, is_dirty=True)
        names = {one.group_id for one in self.board.episodes(OWNER, run=run, limit=10_000).episodes}
        begun = [one for one in new if one.group_id in names]
        assert begun in ([], new)
        for one in begun:
            self.begun(run, one)

    def new_group(self, **fields: Any) -> NewGroup:
        self.made += 1
        return NewGroup(group_id=f"g{self.made}", **fields)

    def begun(self, run: str, new: NewGroup) -> None:
        self.specs.append((run, new))
        group = MGroup(
            run=self.model.runs[run],
            name=new.group_id,
            serial=int(new.group_id[1:]),
            size=new.size,
            count=new.count or new.size,
            min_size=min(2, new.size),
            on_loss=new.on_loss,
            kind=new.kind,
            priority=new.priority,
            environment=new.task.environment,
            max_attempts=new.max_attempts or self.max_attempts,
            deadline=None if new.deadline_s is None else self.now + new.deadline_s,
        )
        group.members = [MEpisode(group, index) for index in range(group.count)]
        group.run.groups.append(group)

    @precondition(lambda self: self.specs)
    @rule(pick=PICK)
    def register_again(self, pick: int) -> None:
        run, spec = self.specs[pick % len(self.specs)]
        (made,) = self.board.register(OWNER, run, [spec], self.now)
        self.model.tick(self.now)
        known = [group for group in self.model.runs[run].groups if group.name == spec.group_id]
        assert (made.is_new, made.is_committed) == (False, not known)
        assert len(made.episode_ids) == (len(known[0].members) if known else 0)

    @rule(run=RUNS, step=st.integers(0, 2))
    def publish(self, run: str, step: int) -> None:
        mine = self.model.runs[run]
        version = mine.version + step
        self.board.publish(OWNER, run, self.now, version=version, model=f"m{version}" if version else "m")
        self.model.tick(self.now)
        mine.version = version
        self.model.lose_stale(mine, self.now)

    @rule(run=RUNS, is_on=SELDOM)
    def pause_or_resume(self, run: str, is_on: bool) -> None:
        mine = self.model.runs[run]
        if not mine.is_paused and not is_on:
            return
        leased = [episode for episode in self.model.episodes() if episode.group.run is mine]
        if mine.is_paused:
            self.board.resume(OWNER, run, self.now)
            self.model.tick(self.now)
            mine.is_paused = False
            for episode in leased:
                if episode.ages:
                    episode.expires = self.now + episode.left
        else:
            self.board.pause(OWNER, run, self.now)
            self.model.tick(self.now)
            for episode in leased:
                episode.left = episode.lease_s if episode.running else episode.expires - self.now
            mine.is_paused = True

    @precondition(lambda self: self.specs)
    @rule(pick=PICK, whole=st.booleans(), more=st.booleans(), is_on=SELDOM)
    def cancel(self, pick: int, whole: bool, more: bool, is_on: bool) -> None:
        groups = [group for run in self.model.runs.values() for group in run.groups]
        if not groups or not is_on:
            return
        group = groups[pick % len(groups)]
        places = {place: episode_id for episode_id, place in self.ids.items()}
        members = group.members[pick % len(group.members) :][: 2 if more else 1]
        ids = [] if whole else [places[member.place] for member in members]
        names = [group.name] if whole else []
        count = self.board.cancel(OWNER, group.run.name, self.now, episode_ids=ids, group_ids=names)
        self.model.tick(self.now)
        assert count == self.model.cancel([] if whole else members, [group] if whole else [])

    @rule(run=RUNS, is_on=SELDOM)
    def delete(self, run: str, is_on: bool) -> None:
        if not is_on:
            return
        count = self.board.delete_run(OWNER, run, self.now)
        self.model.tick(self.now)
        assert count == self.model.delete(self.model.runs[run])
        self.specs = [(name, spec) for name, spec in self.specs if name != run]
        self.now += 2.0**-20  # no two runs are made at the same moment
        self.board.put_run(OWNER, run, self.now, settings=self.settings, model="m")

    @precondition(lambda self: any(episode.state == "parked" for episode in self.model.episodes()))
    @rule(pick=PICK)
    def requeue(self, pick: int) -> None:
        self.board.tick(self.now)
        self.model.tick(self.now)
        parked = [episode for episode in self.model.episodes() if episode.state == "parked"]
        episode = parked[pick % len(parked)]
        (episode_id,) = [name for name, place in self.ids.items() if place == episode.place]
        if episode.group.state != "open":
            with pytest.raises(BoardError):
                self.board.requeue(OWNER, [episode_id], self.now)
            return
        assert self.board.requeue(OWNER, [episode_id], self.now) == 1
        episode.state, episode.is_ready, episode.not_before = "queued", True, self.now
        episode.strikes = episode.lost = 0

    @rule(run=RUNS, back=st.integers(0, 3), limit=st.integers(1, 3), newer=st.sampled_from([None, 0, 1, 2]))
    def read(self, run: str, back: int, limit: int, newer: int | None) -> None:
        self.board.tick(self.now)
        self.model.tick(self.now)
        mine = self.model.runs[run]
        after = max(mine.committed, len(mine.log) - back)
        version = None if newer is None else mine.version + newer
        found = self.board.delivered(OWNER, run, self.now, after=after, limit=limit, version=version)
        expected = self.model.read(mine, after, limit, version)
        assert [(group.number, group.group_id, group.state) for group in found] == [
            (group.number, group.name, group.state) for group in expected
        ]
        for played, group in zip(found, expected, strict=True):
            self.check_played([one.info for one in played.episodes], group)

    def check_played(self, infos: list[EpisodeInfo], group: MGroup) -> None:
        """Reward and attempt of exactly the ends that were acknowledged; a group that is ready is whole."""
        assert [info.index for info in infos] == [member.index for member in group.having("ended")]
        for info in infos:
            assert info.result == EpisodeResult(reward=self.model.accepted[self.ids[info.episode_id], info.attempt])
        if group.state == "ready" and group.on_loss != "shrink":
            assert len(infos) == group.size

    @rule(run=RUNS, pick=PICK)
    def commit(self, run: str, pick: int) -> None:
        self.board.tick(self.now)
        self.model.tick(self.now)
        mine = self.model.runs[run]
        cursor = pick % (len(mine.log) + 2)
        if cursor > len(mine.log):
            with pytest.raises(BoardError, match="the newest group"):
                self.board.commit(OWNER, run, cursor, self.now)
            return
        self.board.commit(OWNER, run, cursor, self.now)
        self.model.commit(mine, cursor)

    # Players

    @rule(
        run=st.sampled_from([None, None, "a", "b"]),
        kind=st.sampled_from([None, None, *K]),
        most=st.integers(1, 3),
        client=CLIENTS,
        is_full=SELDOM,
    )
    def claim(self, run: str | None, kind: Any, most: int, client: str, is_full: bool) -> None:
        claim = f"claim-{len(self.claimed)}"
        self.claimed.append((client, claim))
        self.take(client, claim, run, kind, most, {"a": "no room"} if is_full else {})

    @precondition(lambda self: self.claimed)
    @rule(pick=PICK)
    def claim_again(self, pick: int) -> None:
        client, claim = self.claimed[pick % len(self.claimed)]
        self.board.tick(self.now)
        self.model.tick(self.now)
        leases = self.model.open_leases(client, claim)
        if not leases and (client, claim) in self.model.claims and (client, claim) not in self.model.forgotten:
            with pytest.raises(BoardError, match="use a new id"):
                self.take(client, claim, None, None, 1, {})
            return
        if not leases:
            self.model.claims.pop((client, claim), None)
            self.model.forgotten.discard((client, claim))
            self.take(client, claim, None, None, 1, {})
            return
        request = ClaimRequest(client_id=client, claim_id=claim, max_n=1)
        again = self.board.claim(OWNER, request, self.now)
        assert {(self.ids[lease.episode_id], lease.attempt) for lease in again} == {
            (episode.place, episode.attempt) for episode in leases
        }
        for episode in leases:
            self.model.renew(episode, self.now)

    def take(self, client: str, claim: str, run: str | None, kind: Any, most: int, full: dict[str, str]) -> None:
        request = ClaimRequest(client_id=client, claim_id=claim, run=run, kind=kind, max_n=most)
        self.board.note_engine(OWNER, "a", "a")
        leases = self.board.claim(OWNER, request, self.now, full=full)
        self.look_up_ids()
        self.model.tick(self.now)
        runs = [one for name, one in self.model.runs.items() if run in (None, name)]
        free = [one for one in runs if one.name not in full]
        some = [min(len(self.model.waiting(one, kind)), self.model.room(one, client)) for one in free]
        assert len(leases) == min(most, sum(some))
        if not leases:
            hold, expected = (
                self.board.why_nothing(OWNER, request, full=full),
                self.model.why_nothing(runs, kind, client, {*full}),
            )
            assert (hold.code in expected) if hold is not None else not expected
        for lease in leases:
            next_ones = {one.place: one for one in self.model.next_ones(self.model.runs[lease.run], kind)}
            episode = next_ones[self.ids[lease.episode_id]]
            assert lease.version == episode.group.run.version
            episode.state, episode.is_ready = "leased", False
            episode.attempt += 1
            assert lease.attempt == episode.attempt
            episode.client, episode.claim, episode.lease_s = client, claim, self.lease_s
            episode.calls, episode.oldest = 0, None
            self.model.renew(episode, self.now)
            self.model.claims.setdefault((client, claim), []).append((episode, episode.attempt))
            self.given.append((lease.episode_id, lease.attempt, client))

    @precondition(lambda self: self.given)
    @rule(pick=PICK, other=st.sampled_from([None, None, "c1", "c2"]))
    def beat(self, pick: int, other: str | None) -> None:
        episode_id, attempt, client = self.lease(pick, other)
        (beat,) = self.board.heartbeat(OWNER, client, [ref(episode_id, attempt)], self.now)
        self.model.tick(self.now)
        place = self.ids[episode_id]
        assert beat.can_continue == self.model.holds(place, attempt, client)
        if beat.can_continue:
            self.model.renew(self.known(place), self.now)
        else:
            assert beat.reason.split(":")[0] == self.model.why_not(place, attempt)

    @precondition(lambda self: self.given)
    @rule(pick=PICK, other=st.sampled_from([None, None, None, "c1", "c2"]), reward=st.sampled_from([0.0, 1.0]))
    def end(self, pick: int, other: str | None, reward: float) -> None:
        episode_id, attempt, client = self.lease(pick, other)
        ask = EndRequest(episode_id=episode_id, attempt=attempt, result=EpisodeResult(reward=reward))
        invalid = EndRequest(episode_id=episode_id, attempt=attempt, result=EpisodeResult())
        wrong, ended = self.board.end(OWNER, client, [invalid, ask], self.now)
        self.model.tick(self.now)
        assert wrong.status is EndStatus.INVALID
        assert ended.status is self.model.end(self.ids[episode_id], attempt, client, reward, self.now)

    @precondition(lambda self: self.given)
    @rule(pick=PICK, other=st.sampled_from([None, "c1"]))
    def release(self, pick: int, other: str | None) -> None:
        episode_id, attempt, client = self.lease(pick, other)
        place = self.ids[episode_id]
        (beat,) = self.board.release(OWNER, client, [ref(episode_id, attempt)], "why", self.now)
        self.model.tick(self.now)
        assert not beat.can_continue
        if self.model.holds(place, attempt, client):
            self.model.lose(self.known(place), "released", self.now)

    @precondition(lambda self: self.given)
    @rule(pick=PICK, older=st.sampled_from([0, 0, 1, 2]))
    def call(self, pick: int, older: int) -> None:
        episode_id, attempt, _ = self.lease(pick, None)
        place = self.ids[episode_id]
        run = self.model.runs[place[0]]
        version = max(run.version - older, 0)
        code = ""
        try:
            self.board.note_call(OWNER, ref(episode_id, attempt), self.now, version=version)
        except BoardError as error:
            code = error.code
        self.model.tick(self.now)
        if not self.model.holds(place, attempt, None):
            assert code == self.model.why_not(place, attempt)
        elif run.is_paused:
            assert code == "paused"
        elif run.lag is not None and run.version - version > run.lag:
            assert code == "stale_weights"
        else:
            assert code == ""
            episode = self.known(place)
            episode.running += 1
            episode.calls += 1
            episode.oldest = version if episode.oldest is None else min(episode.oldest, version)

    @precondition(lambda self: self.given)
    @rule(pick=PICK)
    def call_over(self, pick: int) -> None:
        episode_id, attempt, _ = self.lease(pick, None)
        self.board.call_over(ref(episode_id, attempt), self.now)
        self.model.tick(self.now)
        if self.model.holds(self.ids[episode_id], attempt, None):
            episode = self.known(self.ids[episode_id])
            if episode.running:
                episode.running -= 1
                self.model.renew(episode, self.now)

    # Time and restarts

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 2.5, 3.0, 7.0, 10.0, 40.0, -4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = self.board.next_event()
        expected = min((one[0] for one in self.model._due(self.now)), default=None)
        assert expected is None or (due is not None and due <= expected)
        self.board.tick(self.now)
        self.model.tick(self.now)

    @rule(client=CLIENTS)
    def claim_many(self, client: str) -> None:
        self.claim(None, None, 6, client, False)

    @precondition(lambda self: self.given)
    @rule(pick=PICK)
    def call_and_be_answered(self, pick: int) -> None:
        for newest in (0, pick):
            self.call(newest, 0)
            self.call_over(newest)

    @rule()
    def wait_until_everything_is_lost(self) -> None:
        self.wait(40.0)
        self.wait(40.0)

    @precondition(lambda self: self.given)
    @rule(reward=st.sampled_from([0.0, 1.0]))
    def end_the_newest(self, reward: float) -> None:
        self.end(0, None, reward)

    @precondition(lambda self: self.given)
    @rule(first=PICK, second=PICK)
    def lose_claim_and_end_late(self, first: int, second: int) -> None:
        self.wait_until_everything_is_lost()
        self.claim(None, None, 3, "c1", False)
        self.end(first, None, 1.0)
        self.end(second, None, 1.0)

    @rule(keep_calls=st.booleans())
    def restart(self, keep_calls: bool, is_dirty: bool = False) -> None:
        """`is_dirty`: there may be something on disk that was not finished."""
        calls = self.board.open_calls() if keep_calls else {}
        self.board = EpisodeBoard.restore(self.disk.load(), self.now, limits=LIMITS, open_calls=calls)
        if is_dirty:
            self.disk.save(self.board)
        assert self.board.take_changes() == []
        self.model.restart(self.now, keep_calls=keep_calls)

    # Always

    @invariant()
    def both_say_the_same(self) -> None:
        self.disk.save(self.board)
        infos = self.look_up_ids()
        places = {self.ids[info.episode_id]: info for info in infos}
        episodes = self.model.episodes()
        assert set(places) == {episode.place for episode in episodes}
        for episode in episodes:
            self.compare(places[episode.place], episode)
        self.check_counts(infos)
        self.check_leases()

    def compare(self, info: EpisodeInfo, episode: MEpisode) -> None:
        assert (info.state, info.attempt) == (episode.state, episode.attempt), episode.place
        assert [(loss.attempt, loss.reason.split(":")[0]) for loss in info.losses] == episode.losses
        assert (info.client_id, info.calls, info.oldest_version) == (episode.client, episode.calls, episode.oldest)
        assert (info.result and info.result.reward) == episode.reward
        if episode.state == "queued":
            assert info.not_before == episode.not_before
        assert info.expires_at == (episode.expires if episode.ages else None)

    def check_counts(self, infos: list[EpisodeInfo]) -> None:
        """They add up; attempts only rise; what is over stays over."""
        for run, mine in self.model.runs.items():
            info = self.board.run_info(OWNER, run)
            states = [one.state for one in infos if one.run == run]
            assert [info.queued, info.leased, info.ended, info.parked] == [
                states.count(state) for state in (S.QUEUED, S.LEASED, S.ENDED, S.PARKED)
            ]
            assert (info.delivered, info.committed) == (len(mine.log), mine.committed)
        for info in infos:
            attempt, state = self.seen.get(info.episode_id, (0, "queued"))
            assert info.attempt >= attempt
            assert state not in ("ended", "cancelled") or info.state in (state, "parked", "cancelled")
            self.seen[info.episode_id] = (info.attempt, info.state)

    def check_leases(self) -> None:
        """Each episode is in one at most."""
        leases = [(lease.ref.episode_id, lease.ref.attempt, lease.client_id) for lease in self.board.leases()]
        assert len({lease[0] for lease in leases}) == len(leases)
        leased = {episode.place: episode for episode in self.model.episodes() if episode.state == "leased"}
        assert {(self.ids[one], attempt, client) for one, attempt, client in leases} == {
            (place, episode.attempt, episode.client) for place, episode in leased.items()
        }

    def look_up_ids(self) -> list[EpisodeInfo]:
        infos = self.board.episodes(OWNER, limit=10_000).episodes
        for info in infos:
            place = (info.run, info.group_id, info.index)
            assert self.ids.setdefault(info.episode_id, place) == place
        return infos

    def lease(self, pick: int, other: str | None) -> tuple[str, int, str]:
        """One that was given once, the latest ones more often, and who speaks for it."""
        episode_id, attempt, client = self.given[-1 - pick % len(self.given)]
        return episode_id, attempt, other or client

    def known(self, place: Place) -> MEpisode:
        episode = self.model.find(place)
        assert episode is not None
        return episode


def ref(episode_id: str, attempt: int) -> LeaseRef:
    return LeaseRef(episode_id=episode_id, attempt=attempt)


# Hypothesis finds short plays and makes them shorter; a long play with fair odds gets further, and its seed repeats it.

Action = Callable[[BoardMachine, Random], None]
ACTIONS: list[tuple[int, Action]] = [
    (10, lambda m, r: m.end(r.randint(0, 5), None, float(r.randint(0, 1)))),
    (3, lambda m, r: m.end(r.randint(0, 30), r.choice(["c1", "c2"]), 1.0)),
    (8, lambda m, r: m.wait(r.choice([0.5, 1.0, 2.0, 3.0, 10.0]))),
    (1, lambda m, r: m.wait(r.choice([-4.0, 40.0]))),
    (8, lambda m, r: m.call(r.randint(0, 4), r.choice([0, 0, 0, 1]))),
    (7, lambda m, r: m.call_over(r.randint(0, 4))),
    (5, lambda m, r: m.beat(r.randint(0, 5), None)),
    (2, lambda m, r: m.beat(r.randint(0, 30), client(r))),
    (2, lambda m, r: m.release(r.randint(0, 5), None)),
    (2, lambda m, r: m.claim_again(r.randrange(1000))),
    (2, lambda m, r: m.specs and m.register_again(r.randrange(1000))),
    (3, lambda m, r: m.publish(run(r), r.randint(0, 2))),
    (2, lambda m, r: m.pause_or_resume(run(r), r.random() < 0.2)),
    (1, lambda m, r: m.cancel(r.randrange(1000), r.random() < 0.5, r.random() < 0.5, True)),
    (1, lambda m, r: m.delete(run(r), r.random() < 0.2)),
    (1, lambda m, r: m.read(run(r), r.randint(0, 5), r.randint(1, 5), r.choice([None, 0, 1, 2]))),
    (1, lambda m, r: m.commit(run(r), r.randrange(1000))),
    (3, lambda m, r: m.restart(r.random() < 0.5)),
    (1, lambda m, r: m.register_in_parts_and_die(run(r), r.choices([1, 2, 3], k=2), r.randint(1, 9))),
]


CLAIMS = 0.2  # of the steps


def client(random: Random) -> str:
    return random.choice(["c1", "c1", "c2"])


def run(random: Random) -> str:
    return random.choice(["a", "a", "b"])


def claim(machine: BoardMachine, random: Random) -> None:
    run, kind = random.choice([None, None, "a"]), random.choice([None, None, *K])
    machine.claim(run, kind, random.randint(1, 4), client(random), random.random() < 0.1)


def register(machine: BoardMachine, random: Random) -> None:
    machine.register(
        run(random),
        random.randint(1, 3),
        random.randint(0, 1),
        random.choice([None, None, 1]),
        random.choice(ENVIRONMENTS),
        on_loss=random.choice([*OnLoss]),
        kind=random.choice([K.TRAIN, K.TRAIN, K.EVAL]),
        priority=random.randint(0, 1),
        deadline_s=random.choice([None, None, None, 12.0]),
    )


def play_at_random(seed: int, steps: int) -> None:
    random = Random(seed)
    machine = BoardMachine()
    policy, times = random.choice([*WeightPolicy]), random.choice([(3.0, 0.0), (10.0, 2.0)])
    machine.begin(
        policy,
        *times,
        max_attempts=random.randint(1, 4),
        eval_first=random.random() < 0.5,
        share=random.choice(SHARES),
        weights=random.choice(WEIGHTS),
    )
    machine.both_say_the_same()
    weights = [weight for weight, _ in ACTIONS]
    for _ in range(steps):
        infos = machine.board.episodes(OWNER, state=S.QUEUED, limit=3)
        if infos.total < 3 and random.random() < 0.3:
            register(machine, random)
        elif random.random() < 0.02 and any(episode.state == "parked" for episode in machine.model.episodes()):
            machine.requeue(random.randrange(1000))
        elif random.random() < CLAIMS:
            claim(machine, random)
        else:
            random.choices(ACTIONS, weights)[0][1](machine, random)
        machine.both_say_the_same()


def test_the_board_does_what_the_model_says() -> None:
    everyday = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)
    run_state_machine_as_test(BoardMachine, settings=everyday)


@pytest.mark.parametrize("seed", range(8))
def test_a_long_play_goes_as_the_model_says(seed: int) -> None:
    play_at_random(seed, 300)


@pytest.mark.slow
def test_the_board_does_what_the_model_says_for_long() -> None:
    long = settings(max_examples=1000, stateful_step_count=100, deadline=None)
    run_state_machine_as_test(BoardMachine, settings=long)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_very_long_plays_go_as_the_model_says(seed: int) -> None:
    play_at_random(seed, 1000)
