"""The board of episodes: runs, groups, episodes and leases in memory, as a pure state machine.

Owns: every rule about who may play, end and read what. Never touches: clocks, randomness, disks, HTTP.

Time is an argument (`now`, seconds since the epoch): it may jump, nothing breaks, but leases age by it. Each call first
does what is due by `now`, one that is refused too. What changed waits in `take_changes()`, to be made durable before
anybody is answered; what others may be waiting for, in `take_news()`. Calls name an owner; what is another's does not
exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Self

from palestra.episodes import (
    attempt_losses,
    deletion,
    delivery,
    interventions,
    leases,
    model_calls,
    restore,
    runs,
    staging,
)
from palestra.episodes import groups as grouping
from palestra.episodes.board_events import (
    AdmittedCall,
    AttemptOutcome,
    BoardEvents,
    EpisodeListing,
    EpisodeQueueState,
    OpenLease,
    RunHold,
    RunProgress,
)
from palestra.episodes.limits import EpisodeLimits
from palestra.episodes.records import BoardGroup, BoardRun, queued_since
from palestra.episodes.search import EpisodeSearch, RunningSearch
from palestra.episodes.staging import Parts
from palestra.episodes.state import BoardState
from palestra.types.episode_rows import Change, SavedRows
from palestra.types.episodes import (
    ClaimRequest,
    EndAnswer,
    EndRequest,
    EpisodeInfo,
    EpisodeKind,
    EpisodeState,
    HeartbeatAnswer,
    Lease,
    LeaseRef,
    NewGroup,
    PlayedGroup,
    Registered,
    RunInfo,
    RunSettings,
)
from palestra.types.rollouts import Task

NOTHING: Mapping[str, str] = {}


class EpisodeBoard:
    """Everything that is refused as a whole raises `BoardError`."""

    def __init__(self, limits: EpisodeLimits | None = None, *, salt: bytes = b"") -> None:
        """`salt` goes into episode ids: boards of different databases must not give the same ones."""
        self._state = BoardState(limits or EpisodeLimits(), salt)

    @classmethod
    def restore(
        cls,
        saved: SavedRows,
        now: float,
        *,
        limits: EpisodeLimits | None = None,
        salt: bytes = b"",
        open_calls: Mapping[LeaseRef, int] | None = None,
    ) -> Self:
        """As it was when the rows were saved. Every open lease begins anew: no client could beat meanwhile.
        `open_calls`: model calls that still run, by lease, where only the board was reloaded."""
        board = cls(limits, salt=salt)
        restore.fill(board._state, saved, open_calls or {}, now)
        return board

    # Of the trainer

    def put_run(
        self, owner: str, run: str, now: float, *, settings: RunSettings | None = None, model: str | None = None
    ) -> RunInfo:
        """Made, or changed where settings or model are given. A stricter weight policy holds at once."""
        self.tick(now)
        return runs.put(self._state, owner, run, settings, model, now).info()

    def run_info(self, owner: str, run: str) -> RunInfo:
        return self._state.run(owner, run).info()

    def progress(self, owner: str, run: str) -> RunProgress:
        """As `run_info`, for who asks after each group."""
        found = self._state.run(owner, run)
        return RunProgress(found.delivered, found.committed, found.settings.push_to)

    def runs(self, owner: str) -> list[RunInfo]:
        mine = self._state.runs.get(owner, {}).values()
        return [run.info() for run in sorted(mine, key=_by_age)]

    def delete_run(self, owner: str, run: str, now: float) -> int:
        """With everything of it; how many episodes that were. Who plays one is told `cancelled`. One that does not
        exist: 0. The name can be used anew, and its episodes have other ids."""
        self.tick(now)
        return deletion.delete(self._state, owner, run, now)

    def register(self, owner: str, run: str, groups: Sequence[NewGroup], now: float) -> list[Registered]:
        """All or none. 429 beyond `max_queued`; 409 where a group of that id was registered differently."""
        self.tick(now)
        return grouping.register(self._state, self._state.run(owner, run), groups, now)

    def register_in_parts(
        self, owner: str, run: str, groups: Sequence[NewGroup], now: float
    ) -> Parts[list[Registered]]:
        """The same, for thousands: to be driven to its end, or closed, with everything saved after each part. Nothing
        of it is seen before the last. Other registrations of the run meanwhile: 503."""
        self.tick(now)
        return staging.register(self._state, self._state.run(owner, run), groups, now)

    def delivered(
        self, owner: str, run: str, now: float, *, after: int, limit: int, version: int | None = None
    ) -> list[PlayedGroup]:
        """Groups that are whole or dropped, by number, from `after` on (not before what is committed: 410). Without
        tokens: `trajectories` are empty. With `version`, train episodes that are too stale for it by the run's policy
        are parked, and their groups dropped, or smaller where they shrink."""
        found = self._run_now(owner, run, now)
        return delivery.read(self._state, found, after, limit, version, now)

    def commit(self, owner: str, run: str, cursor: int, now: float) -> RunInfo:
        """Forgets the groups up to `cursor`. Less than what is committed changes nothing; beyond the newest: 409."""
        return staging.at_once(self.commit_in_parts(owner, run, cursor, now))

    def commit_in_parts(self, owner: str, run: str, cursor: int, now: float) -> Parts[RunInfo]:
        found = self._run_now(owner, run, now)
        yield from staging.commit(self._state, found, cursor, now)
        return found.info()

    def commit_one(self, owner: str, run: str, number: int, now: float) -> RunInfo:
        """Forgets one group, whatever is before it: for those that each have a listener of their own."""
        found = self._run_now(owner, run, now)
        delivery.commit_one(self._state, found, number, now)
        return found.info()

    def publish(self, owner: str, run: str, now: float, *, version: int, model: str) -> RunInfo:
        """Newer weights. The same again changes nothing; an older version, or another model under the same one: 409."""
        found = self._run_now(owner, run, now)
        runs.publish(self._state, found, version, model, now)
        return found.info()

    def pause(self, owner: str, run: str, now: float) -> RunInfo:
        """Nothing is claimed, model calls are refused (503, `paused`), no lease ages; ends and beats are taken."""
        found = self._run_now(owner, run, now)
        runs.pause(self._state, found, now)
        return found.info()

    def resume(self, owner: str, run: str, now: float) -> RunInfo:
        found = self._run_now(owner, run, now)
        runs.resume(self._state, found, now)
        return found.info()

    def cancel(
        self,
        owner: str,
        run: str,
        now: float,
        *,
        episode_ids: Iterable[str] = (),
        group_ids: Iterable[str] = (),
        reason: str = "",
    ) -> int:
        """How many episodes were; those that are over already stay. A cancelled group is delivered as dropped; a
        cancelled member counts as lost in its group. An unknown id: 404, and nothing is cancelled."""
        return staging.at_once(
            self.cancel_in_parts(owner, run, now, episode_ids=episode_ids, group_ids=group_ids, reason=reason)
        )

    def cancel_in_parts(
        self,
        owner: str,
        run: str,
        now: float,
        *,
        episode_ids: Iterable[str] = (),
        group_ids: Iterable[str] = (),
        reason: str = "",
    ) -> Parts[int]:
        found = self._run_now(owner, run, now)
        return staging.cancel(self._state, found, list(episode_ids), list(group_ids), reason, now)

    def requeue(self, owner: str, episode_ids: Iterable[str], now: float) -> int:
        """Parked episodes of open groups, with their count of losses set back. All, or 404 or 409."""
        self.tick(now)
        return interventions.requeue(self._state, owner, list(episode_ids), now)

    # Of the player

    def claim(self, owner: str, request: ClaimRequest, now: float, *, full: Mapping[str, str] = NOTHING) -> list[Lease]:
        """Up to `max_n` leases; those of the same claim before, where it is repeated. `base_url` and `api_key` are
        empty. An empty list: nothing to play now. 429: the client holds too many; 409: all leases of this `claim_id`
        are over; 404: no such run. `full`: engines that have no room, with why; nothing new is given for them."""
        self.tick(now)
        return leases.claim(self._state, owner, request, full, now)

    def why_nothing(self, owner: str, request: ClaimRequest, *, full: Mapping[str, str] = NOTHING) -> RunHold | None:
        """After an empty list: None where there is nothing to play."""
        return leases.why_nothing(self._state, owner, request, full)

    def heartbeat(
        self, owner: str, client_id: str | None, refs: Sequence[LeaseRef], now: float
    ) -> list[HeartbeatAnswer]:
        """One for each. `client_id` None: the caller has shown the attempt's own key."""
        self.tick(now)
        return [leases.beat(self._state, owner, client_id, ref, now) for ref in refs]

    def end(self, owner: str, client_id: str | None, ends: Sequence[EndRequest], now: float) -> list[EndAnswer]:
        """One for each; what one of them is refused for does not concern the others."""
        self.tick(now)
        return [leases.end(self._state, owner, client_id, request, now) for request in ends]

    def release(
        self, owner: str, client_id: str | None, refs: Sequence[LeaseRef], reason: str, now: float
    ) -> list[HeartbeatAnswer]:
        """Given back for somebody else, after a back-off: no strike. `can_continue` is False for each."""
        self.tick(now)
        return [leases.release(self._state, owner, client_id, ref, reason, now) for ref in refs]

    # Of model calls

    def note_call(self, owner: str, lease: LeaseRef, now: float, *, version: int | None = None) -> AdmittedCall:
        """Before each: counts it, and keeps the lease until `call_over`. `version`: of the weights it will be answered
        by, where that is not the run's newest. Refused with the code of `BoardError`: 409 lease_lost, cancelled,
        stale_weights, deadline; 404 unknown; 429 quota_exceeded; 503 paused."""
        self.tick(now)
        return model_calls.note_call(self._state, owner, lease, version)

    def note_engine(self, owner: str, run: str, engine: str) -> None:
        """That answers the run's calls. A restart forgets it."""
        self._state.run(owner, run).engine = engine

    def engine_of(self, owner: str, run: str) -> str:
        """Empty where none was noted, or the run is deleted meanwhile."""
        found = self._state.runs.get(owner, {}).get(run)
        return "" if found is None else found.engine

    def sampled(self, lease: LeaseRef, tokens: int) -> None:
        """By a call that was noted. Of an attempt that is over, it changes nothing."""
        model_calls.sampled(self._state, lease, tokens)

    def call_over(self, lease: LeaseRef, now: float) -> None:
        """After each that was noted, however it went; renews the lease. One that nobody knows changes nothing."""
        self.tick(now)
        model_calls.call_over(self._state, lease, now)

    def open_calls(self) -> dict[LeaseRef, int]:
        """For `restore`."""
        leased = (episode for run in self._all_runs() for episode in run.leased.values())
        return {episode.ref: episode.open_calls for episode in leased if episode.open_calls}

    # To look at

    def find(self, owner: str, episode_id: str) -> EpisodeInfo:
        """404 where there is none."""
        return self._state.episode(owner, episode_id).info()

    def outcome(self, lease: OpenLease) -> AttemptOutcome | None:
        """How an attempt that is over ended. None: its episode is gone."""
        found = self._state.episodes.get(lease.ref.episode_id)
        if found is None or found.run.owner != lease.owner:
            return None
        loss = None
        for one in found.losses:
            if one.attempt == lease.ref.attempt:
                loss = one
        over_at, why = (found.ended_at, None) if loss is None else (loss.at, loss.reason)
        return AttemptOutcome(over_at, why, found.state)

    def queued_s(self, episode_id: str, attempt: int) -> float | None:
        """How long it could have been claimed before it was. None: it is not leased in this attempt any more."""
        found = self._state.episodes.get(episode_id)
        if found is None or found.attempt != attempt or found.claimed_at is None:
            return None
        return found.claimed_at - queued_since(found, attempt, found.claimed_at)

    def task(self, owner: str, episode_id: str) -> Task:
        """404 where there is no such episode."""
        return self._state.episode(owner, episode_id).group.spec.task

    def first_member(self, owner: str, run: str, group_id: str) -> str | None:
        """The id of a group's first episode, also of one that is committed, for as long as that is remembered. None:
        there is no such group, or no such run."""
        found = self._state.runs.get(owner, {}).get(run)
        return None if found is None else grouping.first_member(self._state, found, group_id)

    def episodes(
        self,
        owner: str,
        *,
        run: str | None = None,
        state: EpisodeState | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> EpisodeListing:
        """In the order of registration."""
        chosen = self._chosen(owner, run)
        total = sum(sum(one.counts.values()) if state is None else one.counts[state] for one in chosen)
        found = (member for one in chosen for group in one.groups.values() for member in group.members)
        matching = (member for member in found if state is None or member.state is state)
        first = min(offset, total)  # islice takes no number beyond 64 bits
        return EpisodeListing([member.info() for member in islice(matching, first, first + limit)], total)

    def search(self, owner: str, criteria: EpisodeSearch, *, limit: int | None, offset: int = 0) -> RunningSearch:
        """In the order of registration, step by step; among what there is now."""
        groups = [group for run in self._chosen(owner, criteria.run) for group in run.groups.values()]
        return RunningSearch(groups, criteria, limit=limit, offset=offset)

    def _chosen(self, owner: str, run: str | None) -> list[BoardRun]:
        mine = self._state.runs.get(owner, {}).values()
        return sorted(mine, key=_by_age) if run is None else [self._state.run(owner, run)]

    def leases(self) -> list[OpenLease]:
        """All that are open, of all owners: after a restart their keys are made again."""
        return [
            OpenLease(run.owner, run.name, episode.client_id, episode.ref, episode.claimed_at or 0.0)
            for run in self._all_runs()
            for episode in run.leased.values()
        ]

    def undelivered(self) -> list[tuple[str, str]]:
        """Owners' runs with groups that are not committed."""
        return [(run.owner, run.name) for run in self._all_runs() if run.log]

    def queues(self) -> list[EpisodeQueueState]:
        """The queues of all owners."""
        return [run.queue_state(kind) for run in self._all_runs() for kind in EpisodeKind]

    # Time, disk, news

    def tick(self, now: float) -> None:
        """Does what is due: expiries, deadlines, ends of back-offs."""
        state = self._state
        if state.timers.earliest <= now:
            self._do_what_is_due(now)
        if state.tombstones.earliest <= now:
            state.tombstones.purge(now)

    def next_event(self) -> float | None:
        """When `tick` should be called next. It may be early, never late."""
        return self._state.timers.next()

    def earliest_event(self) -> float:
        """As `next_event`, and earlier at times: for who asks after each call."""
        return self._state.timers.earliest

    def _do_what_is_due(self, now: float) -> None:
        state = self._state
        for what in state.timers.due(now):
            if isinstance(what, BoardGroup):
                attempt_losses.deadline_passed(state, what, now)
            elif what.state is EpisodeState.LEASED:
                attempt_losses.lose(state, what, "expired", f"no heartbeat for {what.lease_s:g} s", now)
            else:
                state.queue(what, now)

    def take_changes(self) -> list[Change]:
        """Since the last time, to be saved in one transaction and in this order. Each row once, as it is now."""
        return self._state.outbox.take()

    def take_news(self) -> BoardEvents:
        """To be looked at before the next call."""
        news = self._state.news
        if news.claimable or news.delivered or news.deleted or news.over:
            self._state.news = BoardEvents()
        return news

    def _run_now(self, owner: str, run: str, now: float) -> BoardRun:
        self.tick(now)
        return self._state.run(owner, run)

    def _all_runs(self) -> Iterator[BoardRun]:
        return (run for mine in self._state.runs.values() for run in mine.values())


def _by_age(run: BoardRun) -> tuple[float, str]:
    return run.created_at, run.name
