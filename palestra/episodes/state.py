"""The state of the board, and the few ways in which it changes."""

from __future__ import annotations

from palestra.episodes import validation
from palestra.episodes.board_events import BoardEvents, OpenLease
from palestra.episodes.errors import BoardError
from palestra.episodes.fair_shares import StrideScheduler
from palestra.episodes.limits import EpisodeLimits
from palestra.episodes.outbox import Outbox
from palestra.episodes.records import BoardEpisode, BoardGroup, BoardRun
from palestra.episodes.repeated_calls import ClaimHistory, Tombstones
from palestra.episodes.timers import Timers
from palestra.types.episodes import MOVES, AttemptLoss, EpisodeState

S = EpisodeState
PLAYING = (S.QUEUED, S.LEASED)


class BoardState:
    def __init__(self, limits: EpisodeLimits, salt: bytes) -> None:
        self.limits, self.salt = limits, salt
        self.runs: dict[str, dict[str, BoardRun]] = {}
        """Runs by owner and name."""
        self.episodes: dict[str, BoardEpisode] = {}
        self.waiting: dict[str, dict[str, BoardRun]] = {}
        """Runs with something in their queues, by owner and name."""
        self.shares = StrideScheduler()
        self.claims = ClaimHistory(limits)
        self.timers = Timers()
        self.outbox = Outbox()
        self.tombstones = Tombstones(limits, self.outbox)
        self.news = BoardEvents()

    def tag(self, owner: str, name: str, created_at: float) -> str:
        """Returns a tag that no other run has, in this database or another one, and that no deleted run of this name
        had."""
        return validation.digest(self.salt.hex(), owner, name, repr(created_at), size=8).hex()

    def run(self, owner: str, name: str) -> BoardRun:
        run = self.runs.get(owner, {}).get(name)
        if run is None:
            raise BoardError(404, f"no run {name[:128]!r}; PUT /episodes/v1/runs/<its name> makes it", code="unknown")
        return run

    def episode(self, owner: str, episode_id: str) -> BoardEpisode:
        episode = self.episodes.get(episode_id)
        if episode is None or episode.run.owner != owner:
            raise BoardError(
                404, f"no episode {episode_id[:128]!r}; it may have been committed and deleted", code="unknown"
            )
        return episode

    def add(self, episode: BoardEpisode) -> None:
        """Adds a new or restored episode."""
        self.episodes[episode.episode_id] = episode
        episode.group.members.append(episode)
        self._count(episode, +1)

    def remove(self, group: BoardGroup) -> None:
        """Removes a group that is over, with its episodes."""
        # group and members refer to each other: otherwise only the garbage collector would free them
        members, group.members = group.members, []
        for episode in members:
            del self.episodes[episode.episode_id]
            self._count(episode, -1)
            self.outbox.episode(episode, is_gone=True)
        del group.run.groups[group.spec.group_id]
        self.outbox.group(group, is_gone=True)

    def move(self, episode: BoardEpisode, to: EpisodeState) -> None:
        if to not in MOVES[episode.state]:
            raise RuntimeError(f"episode {episode.episode_id} cannot move from {episode.state} to {to}")
        if episode.state is S.LEASED:
            self._close_lease(episode)
            if to is not S.ENDED:
                episode.client_id = episode.claim_id = ""
                episode.claimed_at = None
        elif episode.is_ready:
            self.unqueue(episode)
        self._count(episode, -1)
        episode.state = to
        self._count(episode, +1)
        self.outbox.episode(episode)

    def queue(self, episode: BoardEpisode, now: float) -> None:
        """Puts a queued episode into its queue: now, or when its back-off is over."""
        if episode.not_before > now:
            self.timers.watch_backoff(episode)
            return
        run = episode.run
        run.queue.push(episode)
        self.waiting.setdefault(run.owner, {})[run.name] = run
        self.news.claimable.add(run.owner)

    def unqueue(self, episode: BoardEpisode) -> None:
        episode.run.queue.discard(episode)
        self.forget_idle(episode.run)

    def forget_idle(self, run: BoardRun) -> None:
        if not run.queue.has(None):
            self.waiting.get(run.owner, {}).pop(run.name, None)

    def open_lease(self, episode: BoardEpisode) -> None:
        """Notes the lease of an episode that has become leased, or is restored as such."""
        run = episode.run
        run.leased[episode.episode_id] = episode
        run.holders[episode.client_id] = run.holders.get(episode.client_id, 0) + 1
        self.claims.add(episode)

    def renew(self, episode: BoardEpisode, now: float) -> None:
        if episode.run.is_paused:
            episode.left_s = episode.lease_s
        else:
            episode.expires_at = now + episode.lease_s
            self.timers.watch_lease(episode)

    def note_loss(self, episode: BoardEpisode, reason: str, now: float) -> None:
        loss = AttemptLoss(attempt=episode.attempt, at=now, reason=reason, client_id=episode.client_id)
        # a new list, because saved rows hold the old one
        episode.losses = [*episode.losses, loss][-self.limits.max_losses :]

    def _close_lease(self, episode: BoardEpisode) -> None:
        run = episode.run
        del run.leased[episode.episode_id]
        remaining = run.holders.pop(episode.client_id) - 1
        if remaining:
            run.holders[episode.client_id] = remaining
        if run.settings.client_share < 1 and run.queue.has(None):
            self.news.claimable.add(run.owner)  # its client may have waited for a free lease
        self.claims.remove(episode)
        episode.open_calls = 0
        episode.armed_at = None
        lease = OpenLease(run.owner, run.name, episode.client_id, episode.ref, episode.claimed_at or 0.0)
        self.news.over.append(lease)

    def _count(self, episode: BoardEpisode, by: int) -> None:
        group = episode.group
        group.run.counts[episode.state] += by
        if episode.state is S.QUEUED:
            group.run.queued[group.spec.kind] += by
        if episode.state in PLAYING:
            group.playing += by
        elif episode.state is S.ENDED:
            group.ended += by
