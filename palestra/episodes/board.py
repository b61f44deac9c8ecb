"""The board of episodes: runs, groups, episodes and leases in memory, as a pure state machine.

Time is an argument (`now`, seconds since the epoch). It may jump without breaking anything, but leases age by it. Each
call first does what is due by `now`, even if the call is then refused. Changes wait in `take_changes()`, to be made
durable before the caller gets an answer; events that others may wait for are in `take_news()`. Calls name an owner; for
them, the data of other owners does not exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Self

from palestra.episodes import (
    attempt_losses,
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
    """The state machine. Every call that is refused as a whole raises `BoardError`."""

    def __init__(self, limits: EpisodeLimits | None = None, *, salt: bytes = b"") -> None:
        """`salt` becomes part of episode ids: boards of different databases must not give the same ids."""
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
        """Restores the board as it was when the rows were saved. Every open lease starts again, because no client could
        send heartbeats meanwhile. `open_calls` are model calls that still run, by lease, if only the board was
        reloaded."""
        board = cls(limits, salt=salt)
        restore.fill(board._state, saved, open_calls or {}, now)
        return board

    # Calls of the trainer

    def put_run(
        self, owner: str, run: str, now: float, *, settings: RunSettings | None = None, model: str | None = None
    ) -> RunInfo:
        """Makes a run, or changes it if settings or model are given. A stricter weight policy takes effect at once."""
        self.tick(now)
        return runs.put(self._state, owner, run, settings, model, now).info()

    def run_info(self, owner: str, run: str) -> RunInfo:
        return self._state.run(owner, run).info()

    def version_of(self, owner: str, run: str, model: str) -> int | None:
        """Returns the version under which a model was published lately."""
        return self._state.run(owner, run).published.get(model)

    def progress(self, owner: str, run: str) -> RunProgress:
        """Like `run_info`, but cheaper: for callers that ask after each group."""
        found = self._state.run(owner, run)
        return RunProgress(found.delivered, found.committed, found.settings.push_to)

    def runs(self, owner: str) -> list[RunInfo]:
        mine = self._state.runs.get(owner, {}).values()
        return [run.info() for run in sorted(mine, key=_by_age)]

    def delete_run(self, owner: str, run: str, now: float) -> int:
        """Deletes a run with everything in it and returns the number of its episodes; 0 if it does not exist. Players
        of its episodes get `cancelled`. The name can be used again, and new episodes get other ids."""
        self.tick(now)
        return runs.delete(self._state, owner, run, now)

    def register(self, owner: str, run: str, groups: Sequence[NewGroup], now: float) -> list[Registered]:
        """Registers all groups or none. 429 beyond `max_queued`; 409 if a group with the same id was registered with
        other content."""
        self.tick(now)
        return grouping.register(self._state, self._state.run(owner, run), groups, now)

    def register_in_parts(
        self, owner: str, run: str, groups: Sequence[NewGroup], now: float
    ) -> Parts[list[Registered]]:
        """The same for thousands of groups. The caller must iterate to the end, or close it, and save everything after
        each part. Nothing of it is visible before the last part. Other registrations of the run meanwhile: 503."""
        self.tick(now)
        return staging.register(self._state, self._state.run(owner, run), groups, now)

    def delivered(
        self, owner: str, run: str, now: float, *, after: int, limit: int, version: int | None = None
    ) -> list[PlayedGroup]:
        """Returns groups that are complete or dropped, by number, after `after` (before the committed cursor: 410).
        They have no tokens: `trajectories` are empty. With `version`, train episodes that are too stale for it by the
        run's policy are parked, and their groups are dropped, or become smaller if their settings allow it."""
        found = self._run_now(owner, run, now)
        return delivery.read(self._state, found, after, limit, version, now)

    def commit(self, owner: str, run: str, cursor: int, now: float) -> RunInfo:
        """Deletes the groups up to `cursor`. A cursor below the committed one changes nothing; beyond the newest:
        409."""
        return staging.at_once(self.commit_in_parts(owner, run, cursor, now))

    def commit_in_parts(self, owner: str, run: str, cursor: int, now: float) -> Parts[RunInfo]:
        found = self._run_now(owner, run, now)
        yield from staging.commit(self._state, found, cursor, now)
        return found.info()

    def commit_one(self, owner: str, run: str, number: int, now: float) -> RunInfo:
        """Deletes one group, whatever comes before it: for groups that are each read by a listener of their own."""
        found = self._run_now(owner, run, now)
        delivery.commit_one(self._state, found, number, now)
        return found.info()

    def publish(self, owner: str, run: str, now: float, *, version: int, model: str) -> RunInfo:
        """Publishes newer weights. The same version again changes nothing; an older one, or another model under the
        same version: 409."""
        found = self._run_now(owner, run, now)
        runs.publish(self._state, found, version, model, now)
        return found.info()

    def pause(self, owner: str, run: str, now: float) -> RunInfo:
        """Pauses a run: nothing is claimed, model calls are refused (503, `paused`), no lease ages; ends and heartbeats
        are accepted."""
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
        """Cancels episodes and groups and returns the number of episodes; those that are over do not change. A
        cancelled group is delivered as dropped; a cancelled member counts as lost in its group. An unknown id: 404, and
        nothing is cancelled."""
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
        """Puts parked episodes of open groups back into the queue and resets their count of losses. All of them, or 404
        or 409."""
        self.tick(now)
        return interventions.requeue(self._state, owner, list(episode_ids), now)

    # Calls of the player

    def claim(self, owner: str, request: ClaimRequest, now: float, *, full: Mapping[str, str] = NOTHING) -> list[Lease]:
        """Returns up to `max_n` leases; if the claim is repeated, the same leases as before. `base_url` and `api_key`
        are empty. An empty list: nothing to play now. 429: the client holds too many; 409: all leases of this
        `claim_id` are over; 404: no such run. `full` has engines without capacity, with the reason; no new leases are
        given for them."""
        self.tick(now)
        return leases.claim(self._state, owner, request, full, now)

    def why_nothing(self, owner: str, request: ClaimRequest, *, full: Mapping[str, str] = NOTHING) -> RunHold | None:
        """Says why a claim returned an empty list; None if there is nothing to play."""
        return leases.why_nothing(self._state, owner, request, full)

    def heartbeat(
        self, owner: str, client_id: str | None, refs: Sequence[LeaseRef], now: float
    ) -> list[HeartbeatAnswer]:
        """Returns one answer for each lease. `client_id` None: the caller has the attempt's own key."""
        self.tick(now)
        return [leases.beat(self._state, owner, client_id, ref, now) for ref in refs]

    def end(self, owner: str, client_id: str | None, ends: Sequence[EndRequest], now: float) -> list[EndAnswer]:
        """Returns one answer for each end; the refusal of one does not affect the others."""
        self.tick(now)
        return [leases.end(self._state, owner, client_id, request, now) for request in ends]

    def release(
        self, owner: str, client_id: str | None, refs: Sequence[LeaseRef], reason: str, now: float
    ) -> list[HeartbeatAnswer]:
        """Gives leases back for other players, after a back-off; this does not count as a strike. `can_continue` is
        False for each."""
        self.tick(now)
        return [leases.release(self._state, owner, client_id, ref, reason, now) for ref in refs]

    # Model calls

    def note_call(self, owner: str, lease: LeaseRef, now: float, *, version: int | None = None) -> AdmittedCall:
        """Called before each model call: counts it, and keeps the lease until `call_over`. `version` is that of the
        weights that will answer, if it is not the run's newest. Refused with the code of `BoardError`: 409 lease_lost,
        cancelled, stale_weights, deadline; 404 unknown; 429 quota_exceeded; 503 paused."""
        self.tick(now)
        return model_calls.note_call(self._state, owner, lease, version)

    def note_engine(self, owner: str, run: str, engine: str) -> None:
        """Notes which engine answers the run's calls. A restart forgets it."""
        self._state.run(owner, run).engine = engine

    def engine_of(self, owner: str, run: str) -> str:
        """Returns the noted engine; empty if none was noted, or the run was deleted meanwhile."""
        found = self._state.runs.get(owner, {}).get(run)
        return "" if found is None else found.engine

    def sampled(self, lease: LeaseRef, tokens: int) -> None:
        """Counts tokens that a noted call has sampled. If the attempt is over, nothing changes."""
        model_calls.sampled(self._state, lease, tokens)

    def call_over(self, lease: LeaseRef, now: float) -> None:
        """Called after each noted call, however it ended; renews the lease. An unknown call changes nothing."""
        self.tick(now)
        model_calls.call_over(self._state, lease, now)

    def open_calls(self) -> dict[LeaseRef, int]:
        """Returns the model calls that run, for `restore`."""
        leased = (episode for run in self._all_runs() for episode in run.leased.values())
        return {episode.ref: episode.open_calls for episode in leased if episode.open_calls}

    # Queries

    def find(self, owner: str, episode_id: str) -> EpisodeInfo:
        """Returns an episode; 404 if it does not exist."""
        return self._state.episode(owner, episode_id).info()

    def outcome(self, lease: OpenLease) -> AttemptOutcome | None:
        """Returns how an attempt that is over ended; None if its episode does not exist any more."""
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
        """Returns how long the attempt could have been claimed before it was; None if it is no longer leased in this
        attempt."""
        found = self._state.episodes.get(episode_id)
        if found is None or found.attempt != attempt or found.claimed_at is None:
            return None
        return found.claimed_at - queued_since(found, attempt, found.claimed_at)

    def task(self, owner: str, episode_id: str) -> Task:
        """Returns the task of an episode; 404 if it does not exist."""
        return self._state.episode(owner, episode_id).group.spec.task

    def first_member(self, owner: str, run: str, group_id: str) -> str | None:
        """Returns the id of a group's first episode, even if the group is committed, as long as that is remembered.
        None: there is no such group, or no such run."""
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
        """Returns episodes in the order of registration."""
        chosen = self._chosen(owner, run)
        total = sum(sum(one.counts.values()) if state is None else one.counts[state] for one in chosen)
        found = (member for one in chosen for group in one.groups.values() for member in group.members)
        matching = (member for member in found if state is None or member.state is state)
        first = min(offset, total)  # islice does not accept numbers beyond 64 bits
        return EpisodeListing([member.info() for member in islice(matching, first, first + limit)], total)

    def search(self, owner: str, criteria: EpisodeSearch, *, limit: int | None, offset: int = 0) -> RunningSearch:
        """Begins a search through the present episodes, in the order of registration; the caller continues it step by
        step."""
        groups = [group for run in self._chosen(owner, criteria.run) for group in run.groups.values()]
        return RunningSearch(groups, criteria, limit=limit, offset=offset)

    def _chosen(self, owner: str, run: str | None) -> list[BoardRun]:
        mine = self._state.runs.get(owner, {}).values()
        return sorted(mine, key=_by_age) if run is None else [self._state.run(owner, run)]

    def leases(self) -> list[OpenLease]:
        """Returns all open leases of all owners: after a restart their keys are made again."""
        return [
            OpenLease(run.owner, run.name, episode.client_id, episode.ref, episode.claimed_at or 0.0)
            for run in self._all_runs()
            for episode in run.leased.values()
        ]

    def undelivered(self) -> list[tuple[str, str]]:
        """Returns owner and name of runs with groups that are not committed."""
        return [(run.owner, run.name) for run in self._all_runs() if run.log]

    def queues(self) -> list[EpisodeQueueState]:
        """Returns the queues of all owners."""
        return [run.queue_state(kind) for run in self._all_runs() for kind in EpisodeKind]

    # Time, changes, events

    def tick(self, now: float) -> None:
        """Does what is due: expired leases, deadlines, ends of back-offs."""
        state = self._state
        if state.timers.earliest <= now:
            self._do_what_is_due(now)
        if state.tombstones.earliest <= now:
            state.tombstones.purge(now)

    def next_event(self) -> float | None:
        """Returns when `tick` should be called next. It may be too early, never too late."""
        return self._state.timers.next()

    def earliest_event(self) -> float:
        """Like `next_event` but cheaper, and sometimes earlier: for callers that ask after each call."""
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
        """Returns the changes since the last call, to be saved in one transaction and in this order. Each row occurs
        once, with its present values."""
        return self._state.outbox.take()

    def take_news(self) -> BoardEvents:
        """Returns events; to be handled before the next call."""
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
