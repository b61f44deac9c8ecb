"""Groups: how they begin, how they react to lost members, and when they are complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from palestra.episodes import validation
from palestra.episodes.errors import BoardError
from palestra.episodes.records import BoardEpisode, BoardGroup, BoardRun, StagedGroup
from palestra.episodes.state import PLAYING, BoardState
from palestra.types.episodes import EpisodeState, GroupState, NewGroup, OnLoss, Registered

FULL_RETRY_S = 1.0  # a queue drains within seconds, as its episodes are claimed


class CheckedGroup(Struct):
    """A group that has passed the checks and may be registered."""

    spec: NewGroup
    text: str

    @property
    def count(self) -> int:
        return self.spec.size if self.spec.count is None else self.spec.count


def register(state: BoardState, run: BoardRun, groups: Sequence[NewGroup], now: float) -> list[Registered]:
    check_not_staging(run)
    new: dict[str, CheckedGroup] = {}
    for group in groups:
        vet(state, run, group, new)
    check_room(run, new.values())
    for vetted in new.values():
        staged = make(state, run, vetted, run.registered, now)
        run.registered += 1
        show(state, staged, now)  # restored runs count their groups by these numbers
    return answers(run, groups, set(new))


def check_not_staging(run: BoardRun) -> None:
    if run.is_staging:
        detail = f"run {run.name!r} is busy with a large registration; send the request again"
        raise BoardError(503, detail, retry_after_s=FULL_RETRY_S)


def vet(state: BoardState, run: BoardRun, group: NewGroup, new: dict[str, CheckedGroup]) -> None:
    """Adds a group to `new` if it is new; refuses one that cannot be registered."""
    text, group_id = validation.check_group(group, state.limits), group.group_id
    known = new.get(group_id) or run.groups.get(group_id)
    stone = state.tombstones.find(tombstone_name(run, group_id), run.owner)
    if (known is not None and known.text != text) or (stone is not None and stone.digest != validation.digest(text)):
        raise BoardError(409, f"group {group_id!r} of run {run.name!r} was registered differently before")
    if known is None and stone is None:
        new[group_id] = CheckedGroup(group, text)


def check_room(run: BoardRun, new: Iterable[CheckedGroup]) -> None:
    more, most = sum([vetted.count for vetted in new]), run.settings.max_queued
    if more > most:
        raise BoardError(413, f"{more} episodes at once: run {run.name!r} queues at most {most}; register fewer")
    queued = run.counts[EpisodeState.QUEUED]
    if queued + more > most:
        detail = f"run {run.name!r} has {queued} episodes queued of at most {most}; register {more} more later"
        raise BoardError(429, detail, retry_after_s=FULL_RETRY_S)


def make(state: BoardState, run: BoardRun, vetted: CheckedGroup, serial: int, now: float) -> StagedGroup:
    """Makes a group that is to be saved and is not visible yet."""
    group = BoardGroup(run=run, spec=vetted.spec, text=vetted.text, serial=serial, created_at=now)
    staged = StagedGroup(group, [_new_member(group, now) for _ in range(vetted.count)])
    state.outbox.group(group)
    for episode in staged.episodes:
        state.outbox.episode(episode)
    return staged


def show(state: BoardState, staged: StagedGroup, now: float) -> None:
    group = staged.group
    group.run.groups[group.spec.group_id] = group
    state.timers.watch_deadline(group)
    for episode in staged.episodes:
        state.add(episode)
        state.queue(episode, now)


def forget_staged(state: BoardState, run: BoardRun) -> None:
    """Deletes groups that were never visible."""
    while run.staged:
        staged = run.staged.popleft()
        state.outbox.group(staged.group, is_gone=True)
        for episode in staged.episodes:
            state.outbox.episode(episode, is_gone=True)


def answers(run: BoardRun, groups: Sequence[NewGroup], fresh: set[str]) -> list[Registered]:
    made: list[Registered] = []
    for group in groups:
        kept = run.groups.get(group.group_id)
        ids = [] if kept is None else [member.episode_id for member in kept.members]
        is_new = group.group_id in fresh
        fresh.discard(group.group_id)  # the same group again in one batch is no longer new
        made.append(Registered(group_id=group.group_id, episode_ids=ids, is_new=is_new, is_committed=kept is None))
    return made


def settle(state: BoardState, group: BoardGroup, now: float, *, why: str = "lost", can_replace: bool = True) -> None:
    """Called after members ended or were lost: completes the group, adds members, or drops it, as its settings say."""
    if group.state is not GroupState.OPEN:
        return
    spec = group.spec
    missing = spec.size - group.playing - group.ended
    if missing > 0 and spec.on_loss is OnLoss.REPLACE and can_replace:
        missing -= _replace(state, group, missing, now)
    left = group.playing + group.ended
    if spec.on_loss is OnLoss.SHRINK and left >= group.min_size:
        missing = 0
    if missing > 0:
        least = group.min_size if spec.on_loss is OnLoss.SHRINK else spec.size
        drop(state, group, f"{why}: {left} of {spec.size} episodes are left, but the group needs {least}", now)
    elif group.ended >= min(spec.size, left):
        _close(state, group, GroupState.READY, "", "its group is complete", now)


def drop(state: BoardState, group: BoardGroup, reason: str, now: float) -> None:
    """Drops an open group."""
    _close(state, group, GroupState.DROPPED, reason, f"its group was dropped ({reason})", now)


def cancel(state: BoardState, episode: BoardEpisode, reason: str, now: float) -> None:
    """Cancels an episode without looking at its group."""
    state.note_loss(episode, f"cancelled: {reason}", now)
    state.move(episode, EpisodeState.CANCELLED)


def first_member(state: BoardState, run: BoardRun, group_id: str) -> str | None:
    if (group := run.groups.get(group_id)) is not None:
        return _member_id(run, group.serial, 0)
    stone = state.tombstones.find(tombstone_name(run, group_id), run.owner)
    return None if stone is None else _member_id(run, -stone.attempt, 0)


def tombstone_name(run: BoardRun, group_id: str) -> str:
    return f"group-{validation.digest(run.tag, group_id).hex()}"


def _add_member(state: BoardState, group: BoardGroup, now: float) -> None:
    episode = _new_member(group, now)
    state.add(episode)
    state.queue(episode, now)
    state.outbox.episode(episode)
    state.outbox.group(group)


def _new_member(group: BoardGroup, now: float) -> BoardEpisode:
    index = group.made
    group.made += 1
    given = group.spec.seeds
    return BoardEpisode(
        episode_id=_member_id(group.run, group.serial, index),
        run=group.run,
        group=group,
        index=index,
        seed=given[index] if index < len(given) else validation.derived_seed(group.spec.group_id, index),
        created_at=now,
    )


def _member_id(run: BoardRun, serial: int, index: int) -> str:
    """Returns the id of a member. Ids increase within a run, so that the database only appends."""
    return f"{run.tag}-{serial:08x}-{index:x}"


def _replace(state: BoardState, group: BoardGroup, missing: int, now: float) -> int:
    """Adds members to replace lost ones, at most as many as the group began with: a task that no player can play must
    come to an end."""
    room = 2 * group.first_count - group.made
    replaced = missing if missing <= room else 0
    for _ in range(replaced):
        _add_member(state, group, now)
    return replaced


def _close(state: BoardState, group: BoardGroup, to: GroupState, reason: str, rest: str, now: float) -> None:
    run = group.run
    run.delivered += 1
    group.state, group.reason, group.number = to, validation.clean_reason(reason), run.delivered
    run.log[run.delivered] = group
    for episode in group.members:
        if episode.state in PLAYING:
            cancel(state, episode, rest, now)
    state.outbox.group(group)  # restored runs count their groups by these numbers
    state.news.delivered.add((run.owner, run.name))
