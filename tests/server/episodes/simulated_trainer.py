"""A trainer that learns nothing, and keeps its books: `python -m tests.server.episodes.simulated_trainer`.

It registers groups, reads what was played, checks that each reward belongs to its tokens, and saves what it counted
with its cursor in one file; then it commits, and publishes weights. Killed at any moment, it goes on from the file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field

from palestra.episodes import EpisodeClient, NewGroup, Run, RunSettings, Task
from palestra.types.episodes import GroupState, PlayedEpisode, PlayedGroup

WINDOW = 32  # groups that may be played at once
SAMPLED = 4  # tokens of each episode
BITS = 40  # of a reward: exact as a float


def reward_of(tokens: Sequence[int]) -> float:
    """Of all that an attempt read and sampled: another's has another."""
    digest = hashlib.sha256(array("i", tokens).tobytes()).digest()
    return int.from_bytes(digest[: BITS // 8], "little") / 2**BITS


class Books(Struct):
    cursor: int = 0
    version: int = 0
    """Of the weights it has made."""
    counted: list[tuple[str, list[str]]] = field(default_factory=list)
    """Groups, and their episodes."""
    attempts: int = 0
    problems: list[str] = field(default_factory=list)


def read_books(file: Path) -> Books:
    return msgspec.json.decode(file.read_bytes(), type=Books) if file.exists() else Books()


def save(file: Path, books: Books) -> None:
    part = file.with_suffix(".part")
    with part.open("wb") as out:
        out.write(msgspec.json.encode(books))
        out.flush()
        os.fsync(out.fileno())
    part.rename(file)


def new_group(number: int, size: int) -> NewGroup:
    task = Task(id=f"t{number}", environment="faults", prompt=[{"role": "user", "content": f"Task {number}"}])
    return NewGroup(group_id=f"step/{number}", task=task, size=size)


def count(books: Books, group: PlayedGroup, size: int) -> None:
    if group.state is not GroupState.READY or len(group.episodes) != size:
        books.problems.append(f"{group.group_id} is {group.state} with {len(group.episodes)}: {group.reason}")
    for episode in group.episodes:
        books.problems += _wrong(episode)
        books.attempts += episode.info.attempt
    books.counted.append((group.group_id, [episode.info.episode_id for episode in group.episodes]))
    books.cursor = group.number


def _wrong(episode: PlayedEpisode) -> list[str]:
    """What of its tokens is not what its reward is for."""
    info, lines = episode.info, episode.trajectories
    if info.result is None or info.result.error is not None:
        return [f"{info.episode_id} has failed: {info.result}"]
    if len(lines) != 1 or sum(lines[0].loss_mask) != SAMPLED:
        return [f"{info.episode_id}#{info.attempt}: {len(lines)} trajectories, {[sum(x.loss_mask) for x in lines]}"]
    if info.result.reward != reward_of(lines[0].tokens):
        return [f"{info.episode_id}#{info.attempt}: its reward is for other tokens"]
    return []


def train(run: Run, file: Path, groups: int, size: int, every: int, dies: str) -> None:
    """`every`: groups from one checkpoint to the next."""
    books = read_books(file)
    while len(books.counted) < groups:
        done = len(books.counted)
        run.register(new_group(number, size) for number in range(done, min(done + WINDOW, groups)))
        for group in run.groups(after=books.cursor):
            count(books, group, size)
            if len(books.counted) == min(done + every, groups):
                break
        die_at("checkpoint", dies, done)
        books.version = max(books.version, run.info.version) + 1
        save(file, books)
        die_at("commit", dies, done)
        run.commit(books.cursor)
        run.publish(books.version, "ephebe")


def die_at(place: str, dies: str, done: int) -> None:
    """`dies`: as "commit:40", before the first commit after 40 groups."""
    where, _, after = dies.partition(":")
    if where == place and done >= int(after):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("run")
    parser.add_argument("file", type=Path)
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--lease", type=float, default=2.0, help="seconds")
    parser.add_argument("--dies", default="")
    args = parser.parse_args()
    settings = RunSettings(max_attempts=16, backoff_s=0.1, lease_s=args.lease)
    with EpisodeClient(args.url, "tml-test") as client:
        run = client.run(args.run, settings, model="ephebe")
        train(run, args.file, args.groups, args.size, args.every, args.dies)


if __name__ == "__main__":
    main()
