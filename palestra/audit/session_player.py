"""Plays episodes of environments that are called turn by turn in this process."""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections.abc import Iterable, Sequence

import psutil

from palestra.audit.episodes import ProbeEpisode, Trouble
from palestra.audit.policies import Moment, ProbePolicy
from palestra.environments.environment_set import EnvironmentSet
from palestra.environments.errors import EnvironmentFailure, EnvironmentTimeout
from palestra.environments.session import EnvSession
from palestra.rollouts.rollout_loop import CHANGED_HISTORY
from palestra.types.rollouts import LARGEST_REWARD, Message, Task

NO_NUMBER = "a reward that is not a finite number"
"""In the error of a step whose reward cannot be used."""


class SessionPlayer:
    knows_memory = True

    def __init__(self, environments: EnvironmentSet, seed: int, at_once: int) -> None:
        self._environments, self._seed, self._at_once = environments, seed, at_once
        self.has_tools = False
        self._process = psutil.Process()

    async def play(self, task: Task, policy: ProbePolicy, repeat: int = 0) -> ProbeEpisode:
        """Plays one episode. Never raises because of the environment."""
        episode = ProbeEpisode(task=task.id, probe=policy.name, repeat=repeat)
        session = self._environments.open(task)
        try:
            await self._play(session, task, policy, episode)
        except EnvironmentTimeout as error:
            episode.trouble, episode.error = Trouble.HUNG, str(error)
        except EnvironmentFailure as error:
            is_number = NO_NUMBER not in str(error)
            episode.trouble, episode.error = Trouble.RAISED if is_number else Trouble.BAD_REWARD, str(error)
        finally:
            await session.close()
        episode.reward = None if episode.trouble else _total(episode.steps)
        return episode

    async def play_together(self, tasks: Sequence[Task], policy: ProbePolicy) -> list[ProbeEpisode]:
        """Plays episodes at the same time; tasks take turns."""
        chosen = [tasks[number % len(tasks)] for number in range(self._at_once)]
        return list(await asyncio.gather(*(self.play(task, policy, 1) for task in chosen)))

    async def _play(self, session: EnvSession, task: Task, policy: ProbePolicy, episode: ProbeEpisode) -> None:
        began_s = time.perf_counter()
        messages = await session.init(task.prompt)
        episode.init_s = time.perf_counter() - began_s
        episode.messages, episode.first = [*messages], len(messages)
        tools = session.tools()
        self.has_tools |= bool(tools)
        for turn in range(min(session.max_turns, policy.turns)):
            rng = random.Random(f"{self._seed}/{task.id}/{policy.name}/{turn}")
            text = policy.say(Moment(task, turn, messages, tools, rng))
            messages.append({"role": "assistant", "content": text})
            episode.messages.append(messages[-1])
            memory, began_s = self._process.memory_info().rss, time.perf_counter()
            result = await session.step(text)
            episode.step_s.append(time.perf_counter() - began_s)
            grown = self._process.memory_info().rss - memory
            episode.step_memory_bytes = max(episode.step_memory_bytes, grown)
            episode.steps.append(result.reward)
            changed: list[Message] | None = result.metadata.get(CHANGED_HISTORY)
            messages = copy.deepcopy(changed) if isinstance(changed, list) else [*messages, *result.observations]
            episode.messages += result.observations
            if result.done:
                episode.is_done = True
                break
        else:
            episode.steps.append(await session.grade())
        episode.verdict = await session.verdict()


def _total(steps: Iterable[float | None]) -> float | None:
    """The sum, as training takes it: unknown if one of them is."""
    rewards = list(steps)
    if not rewards or any(one is None for one in rewards):
        return None
    total = sum(one for one in rewards if one is not None)
    return total if abs(total) <= LARGEST_REWARD else None
