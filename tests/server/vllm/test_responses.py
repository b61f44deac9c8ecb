"""vLLM's answers become our records, whole or in parts."""

from __future__ import annotations

import msgspec
import pytest

from palestra.server.replicas.errors import ReplicaLost
from palestra.server.vllm.responses import COMPLETION, GrowingSequences, ScoredToken, VllmPromptScores
from palestra.types.sampling import StopReason, TopLogprobs


def part(index: int, tokens: list[int], finish: str | None = None, top: dict[int, float] | None = None) -> bytes:
    """As vLLM writes it; the token's own logprob is minus its id."""
    own = [{f"token_id:{t}": -float(t)} | {f"token_id:{k}": v for k, v in (top or {}).items()} for t in tokens]
    logprobs = {
        "tokens": [f"token_id:{t}" for t in tokens],
        "token_logprobs": [-float(t) for t in tokens],
        "top_logprobs": own,
        "text_offset": [0] * len(tokens),
    }
    return msgspec.json.encode({"choices": [{"index": index, "finish_reason": finish, "logprobs": logprobs}]})


def test_a_stream_comes_to_what_the_whole_answer_says():
    whole, streamed = GrowingSequences((1,), 2, top=0), GrowingSequences((1,), 2, top=0)
    for answer in (part(0, [5, 6, 7], "stop"), part(1, [8], "length")):
        whole.add(COMPLETION.decode(answer))
    for answer in (part(0, [5]), part(1, [8], "length"), part(0, [6, 7]), part(0, [], "stop")):
        streamed.add(COMPLETION.decode(answer))
    assert whole.rows == streamed.rows
    assert [(r.tokens, r.logprobs, r.stop_reason) for r in whole.rows] == [
        ([5, 6, 7], [-5.0, -6.0, -7.0], StopReason.STOP),
        ([8], [-8.0], StopReason.LENGTH),
    ]
    whole.check_whole()


def test_the_likeliest_are_k_without_the_token_itself_unless_it_is_one():
    rows = GrowingSequences((1,), 1, top=2)
    rows.add(COMPLETION.decode(part(0, [5], top={1: -0.5, 2: -1.0})))
    rows.add(COMPLETION.decode(part(0, [1], "stop", top={2: -1.5})))
    assert rows.rows[0].topk_logprobs == [TopLogprobs((1, 2), (-0.5, -1.0)), TopLogprobs((1, 2), (-1.0, -1.5))]


def test_prompt_scores_are_of_the_prompts_own_tokens():
    response = [None, {"9": ScoredToken(-0.1), "5": ScoredToken(-3.0)}]
    scores = VllmPromptScores.of(response, (4, 5), 1)
    assert scores.logprobs == [None, -3.0]
    assert scores.top == [None, TopLogprobs((9,), (-0.1,))]
    with pytest.raises(ReplicaLost, match="2 tokens of a prompt of 3"):
        VllmPromptScores.of(response, (4, 5, 6), 1)


@pytest.mark.parametrize(
    "answer",
    [
        b'{"error": {"message": "boom", "code": 500}}',
        part(0, [1], "repetition"),
        part(0, [1], "stop").replace(b"token_id:", b""),
    ],
)
def test_an_answer_without_sense_is_a_lost_one(answer: bytes):
    with pytest.raises(ReplicaLost):
        GrowingSequences((1,), 1, top=0).add(COMPLETION.decode(answer))


def test_an_answer_that_ends_early_is_a_lost_one():
    rows = GrowingSequences((1,), 2, top=0)
    rows.add(COMPLETION.decode(part(0, [1], "stop")))
    with pytest.raises(ReplicaLost, match="ended before"):
        rows.check_whole()
