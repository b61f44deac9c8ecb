"""Compares the rewards of a step within groups or the batch, and returns their advantages."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from palestra.config.algorithm import AdvantageKind
from palestra.config.train import GrpoConfig
from palestra.training.batches.advantages import are_equal, decoupled_advantages, shaped_reward, step_advantages
from palestra.training.batches.span_credit import spans_mean, spans_teach
from palestra.training.batches.tree_credit import TreeCredit, credit_tree
from palestra.training.batches.turn_credit import TurnCredit, credit_turns
from palestra.training.custom_functions import FunctionError, custom_advantage
from palestra.types.rollouts import Group, Rollout, is_usable
from palestra.util.suggest import did_you_mean

REWARD = "reward"
"""The part of `algorithm.reward_parts` that is the rollout's reward, after penalties."""

Rewards = dict[str, float]
"""Rewards, or advantages, by rollout id."""


class ComparedGroup(NamedTuple):
    group: Group
    rewards: Rewards
    """Those of rollouts that count in a baseline."""
    advantages: Mapping[str, Rewards]
    """By agent, "" for whole rollouts; empty if the group teaches nothing."""
    turns: TurnCredit | None
    """Advantages of single turns, if they have their own."""
    tree: TreeCredit | None
    """Those that follow from forks, if there are some."""
    spans: float
    """Mean reward of all parts of turns that were graded."""


def is_zero_variance(group: Group, config: GrpoConfig) -> bool:
    """Whether the rewards of its graded rollouts, including penalties, are all equal, so that nothing can be learned.
    This is also true if none is graded, and false if rollouts are compared with those of other groups."""
    tree, rewards = _tree(group, config), _rewards(group, config)
    return not _can_teach(group, _backed_up(rewards, tree), _turns(group, rewards, config) or tree, config)


def compare(groups: Sequence[Group], config: GrpoConfig, salt: str) -> Iterator[ComparedGroup]:
    """Compares the groups of a step; `salt` seeds what is random about it. Raises FunctionError."""
    trees_G = [_tree(group, config) for group in groups]
    rewards_G = [_backed_up(_rewards(group, config), tree) for group, tree in zip(groups, trees_G, strict=True)]
    if config.algorithm.shuffle_rewards:
        rewards_G = _shuffled(rewards_G, salt)
    is_kept = config.data.zero_variance == "keep"
    turns_G = [_turns(group, own, config) for group, own in zip(groups, rewards_G, strict=True)]
    all_G = zip(groups, rewards_G, turns_G, trees_G, strict=True)
    teach_G = [is_kept or _can_teach(group, own, turns or tree, config) for group, own, turns, tree in all_G]
    kind = config.algorithm.advantage
    if not isinstance(kind, AdvantageKind):
        advantages_G = [
            _custom(kind, group, rewards, config) if teaches else {}
            for group, rewards, teaches in zip(groups, rewards_G, teach_G, strict=True)
        ]
    elif kind is AdvantageKind.GDPO:
        advantages_G = _decoupled(groups, rewards_G, config)
    else:
        advantages_G = _built_in(kind, groups, rewards_G, config)
    found = zip(groups, rewards_G, advantages_G, turns_G, trees_G, teach_G, strict=True)
    for group, rewards, advantages, turns, tree, teaches in found:
        spans = spans_mean(_with_forks(group, rewards, tree))
        yield ComparedGroup(group, rewards, advantages if teaches else {}, turns, tree, spans)


def _built_in(
    kind: AdvantageKind, groups: Sequence[Group], rewards: Sequence[Rewards], config: GrpoConfig
) -> list[dict[str, Rewards]]:
    compared_G = [_by_agent(group, own, config) for group, own in zip(groups, rewards, strict=True)]
    advantages_G: list[dict[str, Rewards]] = [{} for _ in groups]
    for agent in sorted({agent for compared in compared_G for agent in compared}):
        places = [place for place, compared in enumerate(compared_G) if agent in compared]
        values_G = [list(compared_G[place][agent].values()) for place in places]
        for place, found in zip(places, step_advantages(values_G, kind, config.algorithm.pass_k), strict=True):
            advantages_G[place][agent] = dict(zip(compared_G[place][agent], found, strict=True))
    return advantages_G


def _decoupled(groups: Sequence[Group], rewards: Sequence[Rewards], config: GrpoConfig) -> list[dict[str, Rewards]]:
    """Raises FunctionError if a part is reported by no rollout at all, since it is probably misspelt."""
    both, weights = list(zip(groups, rewards, strict=True)), config.algorithm.reward_parts
    known = {REWARD, *(name for group, own in both for one in _counted(group, own) for name in one.metrics)}
    if any(rewards) and (missing := [name for name in weights if name not in known]):
        hint = did_you_mean(missing[0], sorted(known))
        raise FunctionError(f"algorithm.reward_parts: no rollout of this step reports {missing[0]!r}; {hint}")
    advantages_G = decoupled_advantages([_parts(group, own, config) for group, own in both], weights)
    return [{"": dict(zip(own, found, strict=True))} for own, found in zip(rewards, advantages_G, strict=True)]


def _custom(name: str, group: Group, rewards: Rewards, config: GrpoConfig) -> dict[str, Rewards]:
    found, custom = {}, custom_advantage(name)
    for agent, own in _by_agent(group, rewards, config).items():
        advantages = custom.advantages(list(own.values()), _counted(group, own))
        found[agent] = dict(zip(own, advantages, strict=True))
    return found


def _turns(group: Group, rewards: Rewards, config: GrpoConfig) -> TurnCredit | None:
    if not (config.algorithm.turns.is_on and config.learns_from_rewards):
        return None
    return credit_turns([row for rollout in _counted(group, rewards) for row in rollout.rows], config.algorithm)


def _tree(group: Group, config: GrpoConfig) -> TreeCredit | None:
    if not any(rollout.forks for rollout in group.rollouts):
        return None
    return credit_tree(group.rollouts, _rewards(group, config, group.all_rollouts), config.algorithm)


def _with_forks(group: Group, rewards: Rewards, tree: TreeCredit | None) -> list[Rollout]:
    forks = tree.forks if tree is not None else set()
    return [one for one in group.all_rollouts if one.id in rewards or one.id in forks]


def _backed_up(rewards: Rewards, tree: TreeCredit | None) -> Rewards:
    return rewards if tree is None else {name: tree.values[name] for name in rewards}


def _can_teach(group: Group, rewards: Rewards, by_turn: TurnCredit | TreeCredit | None, config: GrpoConfig) -> bool:
    if by_turn is not None and by_turn.teaches:
        return True
    if config.algorithm.span_weight and spans_teach(_counted(group, rewards)):
        return True
    match config.algorithm.advantage:
        case AdvantageKind.REINFORCE_PP:
            return bool(rewards)
        case AdvantageKind.GDPO:
            compared = list(_parts(group, rewards, config).values())
        case _:
            compared = [list(own.values()) for own in _by_agent(group, rewards, config).values()]
    return any(not are_equal(values) for values in compared)


def _by_agent(group: Group, rewards: Rewards, config: GrpoConfig) -> dict[str, Rewards]:
    """Returns the rewards that are compared with each other: those of the rollouts under "", and those of each agent
    that is graded by itself, compared with the same agent in the group's other rollouts. If rewards were shuffled (a
    control experiment), the agents' own rewards are left out, as they would reveal the true ones."""
    compared = {"": rewards}
    if config.algorithm.shuffle_rewards:
        return compared
    for rollout in group.rollouts:
        for agent, reward in rollout.agent_rewards.items():
            if agent and rollout.id in rewards and is_usable(reward):
                compared.setdefault(agent, {})[rollout.id] = reward
    return compared


def _parts(group: Group, rewards: Rewards, config: GrpoConfig) -> dict[str, list[float]]:
    """Returns the parts of the reward that gdpo compares, in the order of `rewards`; what a rollout does not report is
    0."""
    return {
        name: [rewards[one.id] if name == REWARD else one.metrics.get(name, 0.0) for one in _counted(group, rewards)]
        for name in config.algorithm.reward_parts
    }


def _counted(group: Group, rewards: Rewards) -> list[Rollout]:
    rollouts = {rollout.id: rollout for rollout in group.rollouts}
    return [rollouts[name] for name in rewards]


def _rewards(group: Group, config: GrpoConfig, of: Sequence[Rollout] | None = None) -> Rewards:
    """Returns the rewards that count in the baseline, by rollout id, or those `of` other rollouts, after the same
    penalties. If nothing is learned from rewards, a rollout without one can be trained on too."""
    if not config.learns_from_rewards:
        return {rollout.id: 0.0 for rollout in group.rollouts if not rollout.has_failed}
    graded = [rollout for rollout in group.rollouts if rollout.is_graded and is_usable(rollout.reward)]
    passed = sum(rollout.reward is not None and rollout.reward >= config.eval.success for rollout in graded)
    limit, pass_rate = config.rollout.max_context, passed / max(len(graded), 1)
    if of is not None:
        graded = [rollout for rollout in of if rollout.is_graded and is_usable(rollout.reward)]
    return {rollout.id: shaped_reward(rollout, config.penalty, limit, pass_rate) for rollout in graded}


def _shuffled(groups: list[dict[str, float]], salt: str) -> list[dict[str, float]]:
    """Assigns the same rewards to random rollouts of the batch."""
    deck = [reward for rewards in groups for reward in rewards.values()]
    random.Random(f"rewards/{salt}").shuffle(deck)
    dealt = iter(deck)
    return [dict(zip(rewards, dealt, strict=False)) for rewards in groups]
