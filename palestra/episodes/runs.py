"""Runs: settings, weights, pauses, and their end."""

from __future__ import annotations

from palestra.episodes import groups, validation
from palestra.episodes.attempt_losses import lose_stale
from palestra.episodes.delivery import forget
from palestra.episodes.errors import BoardError
from palestra.episodes.records import BoardRun
from palestra.episodes.state import PLAYING, BoardState
from palestra.types.episodes import EpisodeState, GroupState, RunSettings


def put(
    state: BoardState, owner: str, name: str, settings: RunSettings | None, model: str | None, now: float
) -> BoardRun:
    validation.check_id("run", name)
    if settings is not None:
        validation.check_settings(settings)
    if model is not None:
        validation.check_model(model)
    mine = state.runs.setdefault(owner, {})
    run = mine.get(name)
    if run is None:
        if len(mine) >= state.limits.max_runs:
            raise BoardError(429, f"there are already {len(mine)} runs, which is the limit; use one of them")
        run = BoardRun(
            owner=owner,
            name=name,
            tag=state.tag(owner, name, now),
            settings=settings or RunSettings(),
            model=model,
            created_at=now,
        )
        run.queue.weigh(run.settings.environment_weights)
        mine[name] = run
        state.outbox.run(run)
        return run
    if (settings or run.settings, model or run.model) != (run.settings, run.model):
        if settings is not None and settings.environment_weights != run.settings.environment_weights:
            run.queue.weigh(settings.environment_weights)
        run.settings, run.model = settings or run.settings, model or run.model
        state.outbox.run(run)
        lose_stale(state, run, now)
        _tell_players(state, run)
    return run


REMEMBERED = 256  # a call under way has tokens of fewer


def publish(state: BoardState, run: BoardRun, version: int, model: str, now: float) -> None:
    validation.check_model(model)
    if (version, model) == (run.version, run.model):
        return
    is_first = run.model is None and version == run.version
    if not is_first and not run.version < version < validation.INT32:
        raise BoardError(
            409,
            f"version {version}: run {run.name!r} already has version {run.version} ({run.model}), and "
            f"versions only rise; a trainer that resumes continues with {run.version + 1}",
        )
    run.version, run.model = version, model
    run.published[model] = version
    if len(run.published) > REMEMBERED:
        del run.published[next(iter(run.published))]
    state.outbox.run(run)
    lose_stale(state, run, now)


def pause(state: BoardState, run: BoardRun, now: float) -> None:
    if run.is_paused:
        return
    for episode in run.leased.values():
        episode.left_s = episode.expires_at - now if episode.does_age else episode.lease_s
    run.is_paused = True
    state.outbox.run(run)


def resume(state: BoardState, run: BoardRun, now: float) -> None:
    if not run.is_paused:
        return
    run.is_paused = False
    state.outbox.run(run)
    for episode in run.leased.values():
        if episode.does_age:
            episode.expires_at = now + episode.left_s
            state.timers.watch_lease(episode)
    _tell_players(state, run)


def delete(state: BoardState, owner: str, name: str, now: float) -> int:
    """Deletes a run and returns the number of its episodes. A repeated end of an episode is still recognised, and
    players are informed."""
    run = state.runs.get(owner, {}).get(name)
    if run is None:
        return 0
    count = sum(run.counts.values())
    for group in list(run.groups.values()):
        if group.state is GroupState.OPEN:
            group.state = GroupState.DROPPED  # so that its deadline has no effect any more
        for episode in group.members:
            if episode.state is EpisodeState.LEASED:
                state.tombstones.put_cancelled(episode.episode_id, owner, episode.attempt, now)
            if episode.state in PLAYING:
                groups.cancel(state, episode, "its run was deleted", now)
        forget(state, group, now)
    groups.forget_staged(state, run)
    del state.runs[owner][name]
    state.outbox.run(run, is_gone=True)
    state.news.delivered.discard((owner, name))
    state.news.deleted.add((owner, name))
    state.news.claimable.add(owner)  # claims that wait for this run must be answered
    return count


def _tell_players(state: BoardState, run: BoardRun) -> None:
    if run.is_open and run.queue.has(None):
        state.news.claimable.add(run.owner)
