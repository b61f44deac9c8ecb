"""The board's rules once more, as plainly as possible: lists that are searched, nothing indexed, nothing shared.

An episode is (run, group, index); its id is the board's affair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from palestra.types.episodes import EndStatus

Place = tuple[str, str, int]
REMAKE = 2  # a group makes at most so many times its first members


@dataclass
class MEpisode:
    group: MGroup
    index: int
    state: str = "queued"
    attempt: int = 0
    strikes: int = 0
    lost: int = 0
    is_ready: bool = True
    not_before: float = 0.0
    client: str = ""
    claim: str = ""
    lease_s: float = 0.0
    expires: float = 0.0
    left: float = 0.0
    running: int = 0
    calls: int = 0
    oldest: int | None = None
    reward: float | None = None
    losses: list[tuple[int, str]] = field(default_factory=list)
    """Attempt and code."""

    @property
    def place(self) -> Place:
        return self.group.run.name, self.group.name, self.index

    @property
    def ages(self) -> bool:
        return self.state == "leased" and not self.running and not self.group.run.is_paused


@dataclass
class MGroup:
    run: MRun
    name: str
    serial: int
    size: int
    count: int
    min_size: int
    on_loss: str
    kind: str
    priority: int
    environment: str
    max_attempts: int
    deadline: float | None
    state: str = "open"
    number: int | None = None
    members: list[MEpisode] = field(default_factory=list)

    def having(self, *states: str) -> list[MEpisode]:
        return [member for member in self.members if member.state in states]


@dataclass
class MRun:
    name: str
    policy: str
    max_lag: int
    backoff_s: float
    eval_first: bool
    share: float
    weighed: tuple[str, ...]
    """Environments with a weight."""
    version: int = 0
    is_paused: bool = False
    committed: int = 0
    groups: list[MGroup] = field(default_factory=list)
    log: list[MGroup] = field(default_factory=list)
    """All ever; the committed ones at the front."""

    @property
    def lag(self) -> int | None:
        return {"finish": None, "lag": self.max_lag, "drop": 0}[self.policy]

    def is_stale(self, episode: MEpisode, version: int) -> bool:
        return self.lag is not None and episode.oldest is not None and version - episode.oldest > self.lag


class Model:
    def __init__(self, max_losses: int) -> None:
        self.max_losses = max_losses
        self.runs: dict[str, MRun] = {}
        self.accepted: dict[tuple[Place, int], float] = {}
        """Rewards that were acknowledged, for ever."""
        self.claims: dict[tuple[str, str], list[tuple[MEpisode, int]]] = {}
        """By client and claim."""
        self.deleted: set[tuple[Place, int]] = set()
        """Attempts that were played when their run was deleted."""
        self.forgotten: set[tuple[str, str]] = set()
        """Claims that a restart let go of."""

    def episodes(self) -> list[MEpisode]:
        return [member for run in self.runs.values() for group in run.groups for member in group.members]

    def find(self, place: Place) -> MEpisode | None:
        return next((episode for episode in self.episodes() if episode.place == place), None)

    # Time

    def tick(self, now: float) -> None:
        while due := self._due(now):
            what = min(due, key=lambda one: one[:3])[3]
            if isinstance(what, MGroup):
                self._deadline(what, now)
            else:
                self.lose(what, "expired", now)
        for episode in self.episodes():
            if episode.state == "queued" and episode.not_before <= now:
                episode.is_ready = True

    def _due(self, now: float) -> list[tuple[float, int, int, MEpisode | MGroup]]:
        found: list[tuple[float, int, int, MEpisode | MGroup]] = []
        for run in self.runs.values():
            for group in run.groups:
                if group.state == "open" and group.deadline is not None and group.deadline <= now:
                    found.append((group.deadline, group.serial, -1, group))
                expired = [member for member in group.members if member.ages and member.expires <= now]
                found += [(member.expires, group.serial, member.index, member) for member in expired]
        return found

    def _deadline(self, group: MGroup, now: float) -> None:
        for member in group.having("queued", "leased"):
            self._over(member, "parked", "deadline")
        self.settle(group, can_replace=False)

    # Losses

    def lose(self, episode: MEpisode, code: str, now: float) -> None:
        episode.lost += 1
        episode.strikes += code == "expired"
        if episode.strikes >= episode.group.max_attempts or episode.lost >= self.max_losses:
            self._over(episode, "parked", code)
            self.settle(episode.group)
            return
        self._over(episode, "queued", code)
        backoff = episode.group.run.backoff_s * 2 ** max(episode.strikes - 1, 0)
        episode.not_before = 0.0 if code == "stale_weights" else now + backoff
        episode.is_ready = episode.not_before <= now

    def lose_stale(self, run: MRun, now: float) -> None:
        for group in sorted(run.groups, key=lambda group: group.serial):
            for member in group.members:
                if member.state == "leased" and run.is_stale(member, run.version):
                    self.lose(member, "stale_weights", now)

    def _over(self, episode: MEpisode, state: str, code: str) -> None:
        """Its attempt, if it has one."""
        episode.losses = [*episode.losses, (episode.attempt, code)][-self.max_losses :]
        if episode.state == "leased":  # who ended it stays known
            episode.client = episode.claim = ""
        episode.state, episode.is_ready, episode.running = state, False, 0

    # Groups

    def settle(self, group: MGroup, *, can_replace: bool = True) -> None:
        if group.state != "open":
            return
        alive, ended = group.having("queued", "leased", "ended"), group.having("ended")
        missing = group.size - len(alive)
        if len(ended) >= group.size:
            self.close(group, "ready")
        elif missing <= 0:
            return
        elif group.on_loss == "replace" and can_replace and len(group.members) + missing <= REMAKE * group.count:
            for _ in range(missing):
                group.members.append(MEpisode(group, len(group.members)))
        elif group.on_loss == "shrink" and len(alive) >= group.min_size:
            if len(ended) == len(alive):
                self.close(group, "ready")
        else:
            self.close(group, "dropped")

    def close(self, group: MGroup, state: str) -> None:
        group.state = state
        group.run.log.append(group)
        group.number = len(group.run.log)
        for member in group.having("queued", "leased"):
            self._over(member, "cancelled", "cancelled")

    def cancel(self, episodes: list[MEpisode], groups: list[MGroup]) -> int:
        count = 0
        for group in groups:
            if group.state == "open":
                for member in group.having("queued", "leased", "parked"):
                    self._over(member, "cancelled", "cancelled")
                    count += 1
                self.close(group, "dropped")
        for episode in episodes:
            if episode.state in ("queued", "leased", "parked"):
                self._over(episode, "cancelled", "cancelled")
                count += 1
        for episode in episodes:
            self.settle(episode.group)
        return count

    # Players

    def waiting(self, run: MRun, kind: str | None) -> list[MEpisode]:
        """In the order in which they are to be claimed."""
        if run.is_paused:
            return []
        found = [
            member
            for group in run.groups
            if kind in (None, group.kind)
            for member in group.members
            if member.state == "queued" and member.is_ready
        ]
        first = "eval" if run.eval_first else "train"
        return sorted(found, key=lambda e: (e.group.kind != first, -e.group.priority, e.group.serial, e.index))

    def next_ones(self, run: MRun, kind: str | None) -> list[MEpisode]:
        """Those of which one must be claimed next: the first of each environment that has a weight, and of the rest."""
        waiting = self.waiting(run, kind)
        urgent = [e for e in waiting if (e.group.kind, e.group.priority) == _rank(waiting[0])]
        places = [e.group.environment if e.group.environment in run.weighed else "" for e in urgent]
        return [e for n, e in enumerate(urgent) if places[n] not in places[:n]]

    def room(self, run: MRun, client: str) -> int:
        mine = [e for e in self.episodes() if e.group.run is run and e.state in ("queued", "leased")]
        if run.share == 1.0:
            return len(mine)
        held = sum(e.state == "leased" and e.client == client for e in mine)
        return max(0, max(1, math.floor(Fraction(run.share).limit_denominator(100) * len(mine))) - held)

    def why_nothing(self, runs: list[MRun], kind: str | None, client: str, full: set[str]) -> set[str]:
        """What may be said of a claim that got nothing; empty: there was nothing."""
        found: set[str] = set()
        for run in runs:
            paused, run.is_paused = run.is_paused, False
            has_some = bool(self.waiting(run, kind))
            run.is_paused = paused
            if paused and (has_some or len(runs) == 1):
                found.add("paused")
            elif run.name in full and not paused and (has_some or len(runs) == 1):
                found.add("engine_full")
            elif has_some and not paused and not self.room(run, client):
                found.add("client_share")
        return found

    def open_leases(self, client: str, claim: str) -> list[MEpisode]:
        mine = self.claims.get((client, claim), [])
        return [e for e, attempt in mine if e.state == "leased" and e.attempt == attempt]

    def renew(self, episode: MEpisode, now: float) -> None:
        if episode.group.run.is_paused:
            episode.left = episode.lease_s
        elif not episode.running:
            episode.expires = now + episode.lease_s

    def holds(self, place: Place, attempt: int, client: str | None) -> bool:
        episode = self.find(place)
        if episode is None or episode.state != "leased" or episode.attempt != attempt:
            return False
        return client in (None, episode.client)

    def why_not(self, place: Place, attempt: int) -> str:
        episode = self.find(place)
        if episode is None:
            return "cancelled" if (place, attempt) in self.deleted else "unknown"
        codes = [code for number, code in episode.losses if number == attempt]
        is_leased = episode.state == "leased" and episode.attempt == attempt
        if not is_leased and codes and codes[0] in ("cancelled", "stale_weights", "deadline"):
            return codes[0]
        return "lease_lost"

    def end(self, place: Place, attempt: int, client: str | None, reward: float, now: float) -> EndStatus:
        if (place, attempt) in self.accepted:
            is_same = self.accepted[place, attempt] == reward
            return EndStatus.REPEATED if is_same else EndStatus.CONFLICT
        if not self.holds(place, attempt, client):
            names = {
                "unknown": EndStatus.UNKNOWN,
                "cancelled": EndStatus.CANCELLED,
                "stale_weights": EndStatus.STALE,
            }
            return names.get(self.why_not(place, attempt), EndStatus.LEASE_LOST)
        episode = self.find(place)
        assert episode is not None
        episode.state, episode.reward, episode.running = "ended", reward, 0
        self.accepted[place, attempt] = reward
        self.settle(episode.group)
        return EndStatus.ACCEPTED

    # The trainer

    def read(self, run: MRun, after: int, limit: int, version: int | None) -> list[MGroup]:
        groups = run.log[after : after + limit]
        for group in groups:
            if version is None or group.state != "ready" or group.kind == "eval":
                continue
            for member in group.having("ended"):
                if run.is_stale(member, version):
                    member.state = "parked"
                    member.losses = [*member.losses, (member.attempt, "stale_weights")][-self.max_losses :]
            if len(group.having("ended")) < (group.min_size if group.on_loss == "shrink" else group.size):
                group.state = "dropped"
        return groups

    def commit(self, run: MRun, cursor: int) -> None:
        if cursor > run.committed:
            run.committed = cursor
            gone = run.log[:cursor]
            run.groups = [group for group in run.groups if group not in gone]

    def delete(self, run: MRun) -> int:
        """Its name begins anew."""
        members = [member for group in run.groups for member in group.members]
        self.deleted |= {(member.place, member.attempt) for member in members if member.state == "leased"}
        for member in members:
            member.state = "gone"
        self.runs[run.name] = MRun(
            run.name, run.policy, run.max_lag, run.backoff_s, run.eval_first, run.share, run.weighed
        )
        return len(members)

    # Restart

    def restart(self, now: float, *, keep_calls: bool) -> None:
        for episode in self.episodes():
            if episode.state == "queued":
                episode.is_ready = episode.not_before <= now
            elif episode.state == "leased":
                if not keep_calls:
                    episode.running = 0
                self.renew(episode, now)
        self.forgotten |= {key for key in self.claims if not self.open_leases(*key)}


def _rank(episode: MEpisode) -> tuple[str, int]:
    return episode.group.kind, episode.group.priority
