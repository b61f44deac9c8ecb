"""Plays one rollout in this process, from the environment's first message to its record, in tokens."""

from __future__ import annotations

from palestra.environments.session import EnvSession
from palestra.environments.snapshots import NotCopyable
from palestra.rollouts.concurrent import cleaning_up
from palestra.rollouts.local.first_turns import FirstTurns
from palestra.rollouts.local.forks import ForkState, ForkStates
from palestra.rollouts.local.token_turns import PlayerContext, TokenTurnSampler
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.rollout_loop import (
    ForkStart,
    LimitsUsed,
    PlayedRollout,
    TurnTaking,
    Watcher,
    play,
)
from palestra.rollouts.sources import blank_rollout
from palestra.types.rollouts import GroupRequest, Rollout, Task


async def play_rollout(
    context: PlayerContext,
    request: GroupRequest,
    index: int,
    sampler: PolicySampler,
    first_turns: FirstTurns | None = None,
    turns: TurnTaking | None = None,
    forking: ForkStates | None = None,
) -> Rollout:
    """Plays a rollout. Always returns a record, whatever happens to the environment or a sample. Without `first_turns`
    it does not share its first request. `forking` keeps the states from which forks may begin."""
    first_turns = first_turns or FirstTurns(sampler, [index])
    rollout = blank_rollout(request, index, request.seeds[index])
    rollout.temperature = context.settings.temperature
    turn_sampler = TokenTurnSampler(context, request.task.name, rollout, sampler, first_turns, index)
    watcher = None if forking is None else ForkWatcher(forking, turn_sampler)
    return await _played(context, request.task, turn_sampler, turns=turns, watcher=watcher)


async def play_fork(
    context: PlayerContext, task: Task, fork: Rollout, state: ForkState, place: int, first_turns: FirstTurns
) -> Rollout:
    """Plays a fork, of which `fork` is the record so far: the rollout goes on from a state in another way. `place` is
    that among the forks from this state, which share their first request."""
    turn_sampler = TokenTurnSampler(context, task.name, fork, first_turns.sampler, first_turns, place, state)
    start = ForkStart(state.world, state.messages, state.used, state.reward)
    return await _played(context, task, turn_sampler, start=start)


async def _played(
    context: PlayerContext,
    task: Task,
    turn_sampler: TokenTurnSampler,
    *,
    turns: TurnTaking | None = None,
    watcher: Watcher | None = None,
    start: ForkStart | None = None,
) -> Rollout:
    session, rollout = context.environments.open(task), turn_sampler.rollout
    try:
        played = await play(session, task, turn_sampler, context.settings, turns, watcher=watcher, start=start)
        rollout.metrics, rollout.verdict = await session.metrics(), await session.verdict()
        return _recorded(rollout, played)
    finally:
        turn_sampler.leave()
        with cleaning_up():
            await session.close()


class ForkWatcher:
    """Keeps the state before each turn, as far as its world can be copied."""

    def __init__(self, states: ForkStates, turn_sampler: TokenTurnSampler) -> None:
        self._states, self._sampler = states, turn_sampler

    async def before_turn(self, used: LimitsUsed, session: EnvSession) -> None:
        if self._states.wants(used.turns):
            try:
                world = await session.snapshot()
            except NotCopyable as error:
                self._states.refusal = str(error)
                return
            self._states.keep(self._sampler.state(used, world))


def _recorded(rollout: Rollout, played: PlayedRollout) -> Rollout:
    for turn, reward, env_s in zip(rollout.turns_in_order, played.rewards, played.env_s, strict=False):
        turn.reward, turn.env_s = reward, env_s
    rollout.stop, rollout.error = played.stop, played.error
    rollout.seconds, rollout.reward = played.seconds, played.reward
    return rollout
