"""Model calls of an attempt: they are admitted and counted, and the lease does not expire while they run."""

from __future__ import annotations

from palestra.episodes.attempt_losses import allowed_lag
from palestra.episodes.board_events import AdmittedCall
from palestra.episodes.errors import BoardError
from palestra.episodes.leases import NoLease, find
from palestra.episodes.records import BoardEpisode
from palestra.episodes.state import BoardState
from palestra.types.episodes import EpisodeState, LeaseRef

PAUSED_RETRY_S = 1.0


def note_call(state: BoardState, owner: str, ref: LeaseRef, version: int | None) -> AdmittedCall:
    found = find(state, owner, None, ref)
    if isinstance(found, NoLease):
        raise BoardError(404 if found.code == "unknown" else 409, str(found), code=found.code)
    run = found.run
    if run.is_paused:
        raise BoardError(503, f"run {run.name!r} is paused", code="paused", retry_after_s=PAUSED_RETRY_S)
    _check_quotas(found)
    version = run.version if version is None else version
    lag = allowed_lag(run)
    if lag is not None and run.version - version > lag:
        message = (
            f"version {version} would answer, but the newest is {run.version} and run {run.name} allows a lag of {lag}"
        )
        raise BoardError(409, f"stale_weights: {message}", code="stale_weights")
    found.open_calls += 1
    found.calls += 1
    oldest = found.oldest_version
    found.oldest_version = version if oldest is None else min(version, oldest)
    state.outbox.episode(found)
    return AdmittedCall(run=run.name, model=run.model, version=version, bounds=run.settings.sampling)


def sampled(state: BoardState, ref: LeaseRef, tokens: int) -> None:
    """Counts the tokens that an attempt has sampled, while it still plays."""
    if (episode := _playing(state, ref)) is not None:
        episode.sampled += tokens
        state.outbox.episode(episode)


def call_over(state: BoardState, ref: LeaseRef, now: float) -> None:
    if (episode := _playing(state, ref)) is not None and episode.open_calls > 0:
        episode.open_calls -= 1
        state.renew(episode, now)


def _check_quotas(episode: BoardEpisode) -> None:
    """Checked before each call: a call that begins within the quotas is finished."""
    settings = episode.run.settings
    for what, used, most in (
        ("max_calls", episode.calls, settings.max_calls),
        ("max_sampled_tokens", episode.sampled, settings.max_sampled_tokens),
    ):
        if most is not None and used >= most:
            message = f"{what}: this attempt has {used}, and run {episode.run.name!r} allows {most}"
            raise BoardError(429, f"{message}; it can still be ended", code="quota_exceeded")


def _playing(state: BoardState, ref: LeaseRef) -> BoardEpisode | None:
    """Returns the episode while this attempt still plays it."""
    episode = state.episodes.get(ref.episode_id)
    is_leased = episode is not None and episode.state is EpisodeState.LEASED and episode.attempt == ref.attempt
    return episode if is_leased else None
