"""Rewards for parts of turns: from characters to tokens, and what they add to advantages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from palestra.rollouts.local.player import play_rollout
from palestra.rollouts.local.span_rewards import CharSpan, token_spans
from palestra.training.batches.compared_rewards import is_zero_variance
from palestra.training.batches.grpo_batch import build_batch
from palestra.types.rollouts import Rollout, RolloutStop, SpanReward
from tests.training.records import group_of, make_config, make_rollout, make_turn
from tests.training.scripted import ScriptedSampler, a_request, a_table, chat_tokenizer

SAID = "First add them. Then halve it."


def play(spans: object) -> Rollout:
    step = {"done": True, "reward": 1.0, "metadata": {"span_rewards": spans}}
    with a_table() as table:
        return asyncio.run(play_rollout(table, a_request(steps=[step]), 0, ScriptedSampler(SAID)))


def test_a_span_has_the_tokens_that_spell_it():
    rollout = play([{"start": 0, "end": 15, "reward": 1.0}, {"start": 16, "end": 30, "reward": -0.5}])
    (turn,) = rollout.turns
    first, second = turn.spans
    tokenizer = chat_tokenizer()
    assert tokenizer.decode(turn.tokens[first.start : first.end]).startswith("First add them.")
    assert tokenizer.decode(turn.tokens[second.start : second.end]).strip().endswith("Then halve it.")
    assert (first.reward, second.reward) == (1.0, -0.5)
    assert second.end == len(turn.tokens) - 1, "the end of the turn spells nothing"


def test_nothing_and_beyond_the_end_are_no_tokens():
    tokens = chat_tokenizer().encode_text(SAID)
    spans = [CharSpan(3, 3, 1.0), CharSpan(500, 600, 1.0), CharSpan(0, 900, 2.0)]
    assert token_spans(spans, tokens, chat_tokenizer()) == [SpanReward(0, len(tokens), 2.0)]


@pytest.mark.parametrize("text", [SAID, "naïve 北京 🙂🙂 end", "🙂"])
def test_every_token_of_a_character_has_its_part_in_it(text: str):
    tokenizer = chat_tokenizer()
    tokens = tokenizer.encode_text(text)
    for at, character in enumerate(text):
        (span,) = token_spans([CharSpan(at, at + 1, 1.0)], tokens, tokenizer)
        spelled = tokenizer.decode(tokens[span.start : span.end])
        assert character in spelled
        assert spelled in text


@pytest.mark.parametrize("spans", ["x", [{"start": -1, "end": 2, "reward": 1}], [{"start": 0, "end": 2}]])
def test_spans_that_cannot_be_read_are_a_failure_of_the_environment(spans: Any):
    rollout = play(spans)
    assert rollout.stop is RolloutStop.ENV_FAILED
    assert "span_rewards should be a list of start, end and reward" in (rollout.error or "")


def test_a_token_gains_by_how_much_its_span_is_above_the_mean_of_the_group():
    turns = [make_turn(3, spans=[SpanReward(0, 2, 1.0)]), make_turn(2, observation=1, spans=[SpanReward(1, 9, 0.0)])]
    group = group_of("g", [make_rollout("g-0", 1.0, turns), make_rollout("g-1", 0.0)])
    config = make_config(algorithm={"normalize": "none", "span_weight": 0.5})
    first, second = build_batch([group], config).sequences
    assert first.advantages == [0, 0, 0.75, 0.75, 0.5, 0, 0.5, 0.25]
    assert second.advantages == [0, 0, -0.5, -0.5, -0.5]
    plain = build_batch([group], make_config(algorithm={"normalize": "none"})).sequences[0]
    assert plain.advantages == [0, 0, 0.5, 0.5, 0.5, 0, 0.5, 0.5]


def test_groups_with_equal_rewards_teach_by_their_spans():
    rollouts = [make_rollout(f"g-{i}", 1.0, [make_turn(2, spans=[SpanReward(0, 1, float(i))])]) for i in range(2)]
    group = group_of("g", rollouts)
    assert is_zero_variance(group, make_config())
    config = make_config(algorithm={"normalize": "none", "span_weight": 1.0})
    assert not is_zero_variance(group, config)
    assert [row.advantages[2:] for row in build_batch([group], config).sequences] == [[-0.5, 0.0], [0.5, 0.0]]
