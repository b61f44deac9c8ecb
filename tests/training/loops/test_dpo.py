"""DPO runs follow the gradient of the DPO loss, beside a reference that stays what it was."""

from __future__ import annotations

import json
import math

import pytest
import torch

from palestra.chat import ChatTokenizer
from palestra.config.bundled import BUNDLED
from palestra.config.train import DpoConfig, RunConfig
from palestra.data.conversations import pair_of
from palestra.data.errors import DatasetError
from palestra.runs.reader import RunStatus
from palestra.runs.record_files import read_lines
from palestra.runs.writer import RunFolder
from palestra.training.batches.preference_losses import AnswerScore, compare
from palestra.training.batches.sft_examples import encode_example
from palestra.training.loops.dpo import PairExample, check_dpo, sum_answer, weigh
from palestra.training.loops.kto import check_kto, mismatched
from tests.training.loops.test_sft import EXAMPLES, Told, load, run, start
from tests.training.scripted import chat_tokenizer

DATA = EXAMPLES / "data" / "preferences.jsonl"
AT_ONCE = ("optimizer.warmup_steps=0", "optimizer.schedule=constant")
SIGNS = ("loss/mean", "dpo/accuracy", "dpo/margin", "dpo/chosen_reward", "dpo/rejected_reward", "data/epoch")


def a_dpo_config(server: str, *overrides: str) -> RunConfig:
    return load("dpo.yaml", f"server={server}", "batch_size=8", *overrides, data=DATA)


def test_a_run_learns_to_prefer_what_was_chosen(ephebe_url, tmp_path):
    response = Told()
    folder, summary = start(
        a_dpo_config(ephebe_url, "steps=4", "beta=0.3", *AT_ONCE, "optimizer.lr=8e-3"), tmp_path, response
    )
    rows = folder.read_metrics()
    assert summary["status"] == RunStatus.DONE
    assert rows[0]["loss/mean"] == pytest.approx(math.log(2), abs=1e-4)  # the policy still is the reference
    assert rows[-1]["loss/mean"] < 0.5
    assert rows[-1]["dpo/accuracy"] >= 0.75
    assert rows[-1]["dpo/margin"] > 0.5 > abs(rows[0]["dpo/margin"])
    last = rows[-1]
    assert last["dpo/margin"] == pytest.approx(last["dpo/chosen_reward"] - last["dpo/rejected_reward"])
    assert last["batch/sequences"] == 16
    assert response.stages == {"start", "collect", "score", "update", "save", "end"}
    assert {"time/score_s", "time/update_s", "throughput/total_tokens_per_s", "optim/grad_norm"} <= last.keys()


@pytest.mark.slow
def test_the_reference_is_what_the_run_began_with_also_after_a_resume(ephebe_url, tmp_path):
    small = (ephebe_url, "batch_size=4", *AT_ONCE, "optimizer.lr=4e-3", "checkpoint.every=1")
    before, _ = start(a_dpo_config(*small, "steps=1"), tmp_path / "before")
    (saved,) = [event for event in before.read_events() if event["event"] == "checkpoint"]
    config = a_dpo_config(*small, "steps=3", f"model.start_from={saved['address']}")
    folder, _ = start(config, tmp_path / "after")
    first, *_ = folder.read_metrics()
    assert first["loss/mean"] == pytest.approx(math.log(2), abs=1e-4)
    (folder.path / "checkpoints" / "step_000003.json").unlink()  # as if killed before it was written
    run(config, RunFolder.open(folder.path))
    found = {1: {}, 2: {}}
    for row in read_lines(folder.metrics_file):
        found[row["attempt"]][row["step"]] = [row[name] for name in SIGNS]
    assert found[2] == {3: pytest.approx(found[1][3], rel=1e-4, abs=1e-5)}
    assert found[1][3][0] < math.log(2) - 0.001


def test_the_weights_are_the_gradient_of_the_dpo_loss():
    """Of a small language model, by autograd: once of the loss as papers write it, once of weighted cross entropy."""
    tokenizer, beta = chat_tokenizer(), 0.03
    rows = [json.loads(line) for line in DATA.read_text().splitlines()[:3]]
    pairs = []
    for place, row in enumerate(rows):
        pair = pair_of(row)
        pairs.append(PairExample(place, *(encode_example(tokenizer, one, 512) for one in (pair.chosen, pair.rejected))))
    torch.manual_seed(0)
    policy, reference = (torch.randn(600, 600, dtype=torch.float64) for _ in range(2))
    policy.requires_grad_()

    def logprobs(table: torch.Tensor, sequence) -> torch.Tensor:
        tokens = torch.tensor(sequence.tokens)
        return torch.log_softmax(table[tokens[:-1]], -1).gather(1, tokens[1:, None])[:, 0]

    def answer(table: torch.Tensor, sequence) -> torch.Tensor:
        return (logprobs(table, sequence) * torch.tensor(sequence.mask[1:])).sum()

    def margin(pair: PairExample) -> torch.Tensor:
        chosen, rejected = ((answer(policy, one) - answer(reference, one).detach()) for one in pair.sequences)
        return beta * (chosen - rejected)

    loss = torch.stack([-torch.nn.functional.logsigmoid(margin(pair)) for pair in pairs]).mean()
    (truth,) = torch.autograd.grad(loss, policy)

    def score(sequence) -> AnswerScore:
        own, other = (sum_answer(sequence, logprobs(table, sequence).tolist()) for table in (policy, reference))
        return AnswerScore(own, sum(sequence.mask), other)

    config = load("dpo.yaml", f"beta={beta}", data=DATA)
    assert isinstance(config, DpoConfig)
    losses = [compare(config, *map(score, pair.sequences)) for pair in pairs]
    weigh(pairs, losses)
    cross_entropy = -sum(
        (logprobs(policy, one) * torch.tensor(one.advantages[1:], dtype=torch.float64)).sum()
        for pair in pairs
        for one in pair.sequences
    )
    (ours,) = torch.autograd.grad(cross_entropy, policy)
    torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-12)
    assert sum(one.value for one in losses) / len(pairs) == pytest.approx(loss.item())
    assert truth.abs().max() > 1e-3


@pytest.mark.parametrize(
    "loss", [pytest.param("ipo", marks=pytest.mark.slow), pytest.param("simpo", marks=pytest.mark.slow), "orpo"]
)
def test_relatives_of_dpo_learn_to_prefer_what_was_chosen(ephebe_url, tmp_path, loss):
    rate = ("steps=4", *AT_ONCE, "optimizer.lr=8e-3")
    folder, summary = start(a_dpo_config(ephebe_url, f"loss={loss}", *rate), tmp_path)
    rows = folder.read_metrics()
    assert summary["status"] == RunStatus.DONE
    assert rows[-1]["loss/mean"] < rows[0]["loss/mean"]
    assert rows[-1]["dpo/accuracy"] >= 0.75
    assert rows[-1]["dpo/margin"] > rows[0]["dpo/margin"]


def test_kto_tells_desirable_answers_from_others_without_pairs(ephebe_url, tmp_path):
    labelled = tmp_path / "labelled.jsonl"
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    halves = [
        {"prompt": row["prompt"], "completion": row["chosen" if place % 2 else "rejected"], "label": bool(place % 2)}
        for place, row in enumerate(rows)
    ]
    labelled.write_text("".join(json.dumps(row) + "\n" for row in halves))
    overrides = ("loss=kto", "steps=5", "batch_size=16", *AT_ONCE, "optimizer.lr=8e-3", f"data={labelled}")
    folder, summary = start(a_dpo_config(ephebe_url, *overrides), tmp_path)
    first, *_, last = folder.read_metrics()
    assert summary["status"] == RunStatus.DONE
    assert first["loss/mean"] == pytest.approx(0.5, abs=1e-4)  # the policy still is the reference
    assert first["kto/kl"] == pytest.approx(0, abs=1e-3)
    assert last["loss/mean"] < 0.48
    assert last["kto/desirable_reward"] > last["kto/undesirable_reward"] + 0.1


def test_an_answer_is_put_after_the_prompt_of_another():
    tokenizer = chat_tokenizer()
    rows = [pair_of(json.loads(line)).chosen for line in DATA.read_text().splitlines()[:2]]
    first, second = (encode_example(tokenizer, one, 512).sequence for one in rows)
    found, _ = mismatched([first, second], 512)
    begin = first.mask.index(True)
    assert found.tokens == first.tokens[:begin] + second.tokens[second.mask.index(True) :]
    assert found.mask == [False] * begin + second.mask[second.mask.index(True) :]
    assert mismatched([first], 512) == []
    assert mismatched([first, second], begin) == []


def test_the_shipped_example_is_in_order(monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    config = load("dpo.yaml")
    assert isinstance(config, DpoConfig)
    check_dpo(config, ChatTokenizer.load(BUNDLED / "ephebe"))


def test_a_bad_label_is_found_before_a_run_begins(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "Hi", "completion": "Hello", "label": "yes"}\n')
    config = load("dpo.yaml", "loss=kto", data=bad)
    assert isinstance(config, DpoConfig)
    with pytest.raises(DatasetError, match=r"bad\.jsonl, line 1: 'label' should be true or false, but is 'yes'"):
        check_kto(config, ChatTokenizer.load(BUNDLED / "ephebe"))


def test_bad_pairs_are_found_before_a_run_begins(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(DATA.read_text() + '{"prompt": "Hi", "chosen": "Hello", "reject": "Go"}\n')
    config = load("dpo.yaml", data=bad)
    assert isinstance(config, DpoConfig)
    with pytest.raises(DatasetError, match=r"bad\.jsonl, line 65: no 'rejected' \(it has 'prompt, chosen, reject'\)"):
        check_dpo(config, ChatTokenizer.load(BUNDLED / "ephebe"))


def test_pairs_too_long_to_compare_end_the_run_with_a_reason(ephebe_url, tmp_path):
    with pytest.raises(DatasetError, match="none of 64 rows has text of the assistant within max_sequence_length"):
        start(a_dpo_config(ephebe_url, "max_sequence_length=8", "steps=1"), tmp_path)
