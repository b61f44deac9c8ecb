"""Pictures of a gym's rows and of its tools' results stand where the tokens say, or the rollout is not learned from."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.chat import ChatTokenizer
from palestra.chat.picture_files import read_pictures
from palestra.rollouts.gym.pictures import show_pictures
from palestra.rollouts.gym.results import NotTrainable
from palestra.rollouts.sources import blank_rollout
from palestra.types import StopReason
from palestra.types.rollouts import Turn
from palestra.util.picture_parts import data_url
from tests.pictures import drawn, file_of
from tests.training.scripted import a_request

URLS = [data_url(file_of(drawn(seed)), "image/png") for seed in range(2)]
INPUT: list[Any] = [{"role": "user", "content": [{"type": "input_image", "image_url": URLS[0]}]}]
RESULT = {"type": "function_call_output", "output": [{"type": "input_image", "image_url": URLS[1]}]}


@pytest.fixture(scope="module")
def tokenizer(random_model) -> ChatTokenizer:
    return ChatTokenizer.load(random_model("qwen3_vl"))


def played(tokenizer: ChatTokenizer):
    """A rollout whose prompt has the first picture, and whose observation has the second."""
    rollout = blank_rollout(a_request(), 0, 7)
    first, second = (
        read_pictures([{"role": "user", "content": [{"type": "image", "image": url}]}], tokenizer.card) for url in URLS
    )
    rollout.prompt = tokenizer.encode_chat(first.messages)
    observation = tokenizer.observation(second.messages)
    turns = ([], [7, tokenizer.turn_end]), (observation, [8, tokenizer.turn_end])
    rollout.turns = [
        Turn(observation=read, tokens=tokens, logprobs=[-1.0, -1.0], stop=StopReason.STOP, version=0)
        for read, tokens in turns
    ]
    answered = {"role": "assistant", "content": ""}
    read = {"role": "user", "content": tokenizer.decode(observation)}
    rollout.messages = [{"role": "user", "content": "Look."}, answered, read, answered]
    return rollout


def test_pictures_of_rows_and_results_are_placed(tokenizer):
    rollout = played(tokenizer)
    show_pictures(rollout, INPUT, [RESULT], tokenizer)
    tokens = [*rollout.prompt, *rollout.turns[0].tokens, *rollout.turns[1].observation]
    assert [one.file.data for one in rollout.pictures] == [file_of(drawn(seed)) for seed in range(2)]
    for one in rollout.pictures:
        assert tokens[one.start : one.end] == [tokenizer.card.image_token] * 12
    assert rollout.messages[0]["content"][0]["image_url"]["url"].startswith("picture:")
    assert len(rollout.picture_files) == 2
    assert [one["role"] for one in rollout.messages] == ["user", "assistant", "user", "assistant"]
    (result,) = [part for part in rollout.messages[2]["content"] if part["type"] == "image_url"]
    assert result["image_url"]["url"] == f"picture:{rollout.pictures[1].file.digest}"


def test_tokens_with_other_pictures_are_not_learned_from(tokenizer):
    for given, output in ((INPUT, []), ("Look.", [RESULT]), (INPUT * 2, [RESULT])):
        with pytest.raises(NotTrainable, match="other pictures than the"):
            show_pictures(played(tokenizer), given, output, tokenizer)
