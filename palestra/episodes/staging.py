"""Calls that are too large for one write: they are done in parts, and other calls may come between them.

Each is a generator that stops after a part; its caller makes the part durable, and continues. A registration is saved
under serial numbers that its run has not counted yet, and is not visible; the last part counts them. So it exists as a
whole or not at all: after a crash during a registration, a restart deletes groups whose number was not counted.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

from palestra.episodes import delivery, groups, interventions
from palestra.episodes.errors import BoardError
from palestra.episodes.records import BoardRun
from palestra.episodes.state import BoardState
from palestra.types.episodes import NewGroup, Registered

T = TypeVar("T")

Parts = Generator[None, None, T]

PART = 1000  # episodes: about 20 ms of the event loop and 30 ms of the disk


def register(state: BoardState, run: BoardRun, new_groups: Sequence[NewGroup], now: float) -> Parts[list[Registered]]:
    groups.check_not_staging(run)
    run.is_staging = True
    state.outbox.run(run)
    is_counted = False
    try:
        new: dict[str, groups.CheckedGroup] = {}
        for number, group in enumerate(new_groups, 1):
            groups.vet(state, run, group, new)
            if number % PART == 0:
                yield from _stop(state, run)
        groups.check_room(run, new.values())
        size = 0
        for serial, vetted in enumerate(new.values(), run.registered):
            run.staged.append(groups.make(state, run, vetted, serial, now))
            size += vetted.count
            if size >= PART:
                size = 0
                yield from _stop(state, run)
        run.registered += len(new)
        state.outbox.run(run)
        is_counted = True
        while run.staged:
            yield from _stop(state, run)
            _show_some(state, run, now)
        return groups.answers(run, new_groups, set(new))
    finally:
        run.is_staging = False
        if _is_there(state, run):
            state.outbox.run(run)
        while is_counted and run.staged:  # closed in the middle: it is registered all the same
            _show_some(state, run, now)
        groups.forget_staged(state, run)


def commit(state: BoardState, run: BoardRun, cursor: int, now: float) -> Parts[None]:
    """Commits in parts; each part is a commit of its own, up to an earlier cursor."""
    delivery.check_known(run, "cursor", cursor)
    while run.committed < cursor:
        size, upto = 0, run.committed
        while upto < cursor and size < PART:
            upto += 1
            size += len(run.log[upto].members) if upto in run.log else 0
        delivery.commit(state, run, upto, now)
        if upto < cursor:
            yield from _stop(state, run)


def cancel(
    state: BoardState, run: BoardRun, episode_ids: Sequence[str], group_ids: Sequence[str], reason: str, now: float
) -> Parts[int]:
    """Cancels groups in parts; unknown names are refused before the first part."""
    chosen, episodes = interventions.chosen(state, run, episode_ids, group_ids)
    count = size = 0
    for group in chosen:
        if size >= PART:
            size = 0
            yield from _stop(state, run)
        size += len(group.members)
        count += interventions.cancel_group(state, group, reason, now)
    return count + interventions.cancel_episodes(state, episodes, reason, now)


def at_once(parts: Parts[T]) -> T:
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


def _stop(state: BoardState, run: BoardRun) -> Parts[None]:
    yield
    if not _is_there(state, run):
        raise BoardError(404, f"run {run.name!r} was deleted meanwhile", code="unknown")


def _is_there(state: BoardState, run: BoardRun) -> bool:
    return state.runs.get(run.owner, {}).get(run.name) is run


def _show_some(state: BoardState, run: BoardRun, now: float) -> None:
    size = 0
    while run.staged and size < PART:
        staged = run.staged.popleft()
        groups.show(state, staged, now)
        size += len(staged.episodes)
