"""On-policy distillation: advantages that others agree with, a KL that falls, refusals, resume."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch

from palestra.config import ConfigError
from palestra.config.bundled import bundled_model
from palestra.config.distillation import DistillationConfig, TeacherConfig
from palestra.config.train import DistillConfig, load_train_config
from palestra.endpoints.model_folders import SetupError
from palestra.rollouts.policy_sampler import SamplingError
from palestra.runs.reader import RunReader, RunStatus
from palestra.runs.writer import RunFolder
from palestra.testing.random_tokenizer import write_tokenizer
from palestra.training.batches.distillation import discounted
from palestra.training.batches.grpo_batch import DropReason, build_batch
from palestra.training.launch import check
from palestra.training.run_checkpoints import RunCheckpoints
from palestra.training.teacher_endpoint import EndpointTeacher
from palestra.training.teacher_vocabulary import check_by_scores
from tests.training.records import group_of, make_rollout, make_turn
from tests.training.scripted import chat_tokenizer
from tests.training.trainers import FEW, SMALL, kill, merged, start, train, wait_for_steps

DISTILL = {"kind": "distill", "rollout": {"group_size": 2, "groups_per_step": 8}, "optimizer": {"lr": 3e-3}}


@pytest.fixture(scope="module")
def taught(ephebe_url: str, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run whose last checkpoint differs from the base model."""
    from palestra.runs.listener import Silence
    from palestra.training.launch import train as run

    settings = {"server": ephebe_url, "runs": str(tmp_path_factory.mktemp("taught")), "name": "taught", "steps": 2}
    config = load_train_config([], [], merged(SMALL, {**settings, "rollout": FEW, "optimizer": {"lr": 1e-2}}))
    with RunFolder.create(config.runs, "taught", config) as folder:
        asyncio.run(run(config, folder, Silence()))
    return folder


def last_address(run: RunReader) -> str:
    newest = RunCheckpoints(run.path / "checkpoints", keep=1).newest()
    assert newest is not None
    return newest.address


def make_config(**settings: Any) -> DistillConfig:
    given = {"environments": [{"name": "math"}], "teachers": [{"model": "ephebe"}], **settings}
    return DistillConfig.model_validate({"algorithm": {"normalize": "none"}, **given})


# Advantages


def scores_of_the_server(url: str, sequences: list[list[int]]) -> list[list[float]]:
    """The base model's logprobs of all tokens but the first, by the SDK; its own tests compare them to transformers."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-any")
    sampler = service.create_sampling_client(base_model="ephebe")
    asked = [sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)) for tokens in sequences]
    found = [future.result() for future in asked]
    service.close("success").result()
    return [[one for one in scores[1:] if one is not None] for scores in found]


def scores_of_transformers(url: str, sequences: list[list[int]]) -> list[list[float]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bundled_model("ephebe"), dtype=torch.float32)
    found = []
    for tokens in sequences:
        with torch.no_grad():
            scores = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
        found.append(scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist())
    return found


@pytest.mark.parametrize(
    "scores_of", [scores_of_the_server, pytest.param(scores_of_transformers, marks=pytest.mark.slow)]
)
def test_advantages_are_the_negative_reverse_kl(run_training, taught, ephebe_url, scores_of):
    """The student is the trained model, the teacher the base model, whose scores others can tell."""
    run = run_training(
        "student",
        **merged(DISTILL, {"teachers": [{"model": "ephebe"}], "steps": 1, "rollout": {"groups_per_step": 3}}),
        model={"start_from": last_address(taught)},
        algorithm={"normalize": "none"},
        distillation={"kl_weight": 0.5},
    )
    rows = run.read_tokens(1)
    assert len(rows) == 6
    expected_scores = scores_of(ephebe_url, [row["prompt"] + row["turns"][0]["tokens"] for row in rows])
    kl = []
    for row, scores in zip(rows, expected_scores, strict=True):
        (turn,) = row["turns"]
        scores = scores[-len(turn["tokens"]) :]
        kl += [own - other for own, other in zip(turn["logprobs"], scores, strict=True)]
        expected = [0.0] * len(row["prompt"]) + [-0.5 * d for d in kl[-len(scores) :]]
        assert row["advantages"] == pytest.approx(expected, abs=2e-4)
    assert max(map(abs, kl)) > 0.1


def test_rewards_are_mixed_in_by_their_weight():
    rollouts = [make_rollout("g-0", 1.0), make_rollout("g-1", 0.0)]
    scores = {"g-0": [0.0, -9.0, -0.5, -1.0, -0.25], "g-1": [0.0, -9.0, -0.5, -0.5, -0.5]}
    settings = {"reward_weight": 2.0, "kl_weight": 3.0}
    config = make_config(
        distillation=settings, algorithm={"normalize": "none", "advantage": "mean_baseline"}, rollout={"group_size": 2}
    )
    one, other = build_batch([group_of("g", rollouts)], config, teacher_logprobs=scores).sequences
    assert one.advantages == pytest.approx([0, 0, 1.0, 1.0 - 1.5, 1.0 + 0.75])
    assert other.advantages == pytest.approx([0, 0, -1.0, -1.0, -1.0])


def test_a_discount_lets_later_tokens_count_for_earlier_ones_but_not_for_those_that_were_read():
    turns = [make_turn(1), make_turn(1, observation=2)]
    scores = {"g-0": [0.0, 0.0, -1.5, 0.0, 0.0, -2.5]}
    config = make_config(distillation={"kl_discount": 0.5})
    (row,) = build_batch([group_of("g", [make_rollout("g-0", 1.0, turns)])], config, teacher_logprobs=scores).sequences
    assert row.advantages == pytest.approx([0, 0, -1.0 + 0.125 * -2.0, 0, 0, -2.0])
    assert discounted([1.0, 2.0, 4.0], 1.0) == [7.0, 6.0, 4.0]


def test_rollouts_without_a_reward_are_learned_from_unless_rewards_count():
    groups = [group_of("g", [make_rollout("g-0", None), make_rollout("g-1", None, [make_turn(cut=True)])])]
    scores = {f"g-{i}": [-1.0] * 5 for i in range(2)}
    assert len(build_batch(groups, make_config(), teacher_logprobs=scores).sequences) == 2
    mixed = make_config(distillation={"reward_weight": 1.0})
    assert build_batch(groups, mixed, teacher_logprobs=scores).dropped == {DropReason.UNGRADED: 2}


# Runs


def kl_curve(run: RunReader) -> list[float]:
    return [row["kl/teacher"] for row in run.read_metrics()]


def test_the_student_learns_from_itself_with_the_answer_at_hand(run_training):
    """Whole distributions, of the model itself with a context that the student does not see."""
    teacher = {"model": "self", "context": "The sum is {answer}."}
    run = run_training(
        "own-teacher",
        **merged(DISTILL, {"teachers": [teacher], "steps": 2, "rollout": {"group_size": 2, "groups_per_step": 2}}),
        distillation={"loss": "forward_kl", "top_k": 8},
    )
    rows = run.read_metrics()
    assert all(row["distill/divergence"] > 0 for row in rows)
    assert all(row["mismatch/logprob_abs_max"] < 1e-3 for row in rows)
    assert rows[0]["loss/sum"] == pytest.approx(rows[0]["distill/divergence"], rel=1e-3)  # a mean over all tokens


def drawn_tokens(run: RunReader, step: int) -> dict[str, list[list[int]]]:
    return {row["id"]: [turn["tokens"] for turn in row["turns"]] for row in run.read_tokens(step)}


@pytest.mark.slow
def test_the_kl_to_the_teacher_falls(run_training, taught):
    run = run_training("falls", **merged(DISTILL, {"teachers": [{"model": str(taught.path)}], "steps": 6}))
    curve = kl_curve(run)
    assert curve[0] > 0.02
    assert sum(curve[-2:]) / 2 < curve[0] / 2
    assert all(row["batch/sequences"] == 16 for row in run.read_metrics())


@pytest.mark.slow
def test_an_endpoint_teaches_the_same_as_the_servers_own_weights(run_training, taught, ephebe_url, monkeypatch):
    monkeypatch.setenv("A_TEACHERS_KEY", "tml-test")
    address = last_address(taught)
    own = run_training("own", **merged(DISTILL, {"teachers": [{"model": address}], "steps": 2}))
    teacher = {"model": address, "endpoint": f"{ephebe_url}/v1", "key_env": "A_TEACHERS_KEY"}
    other = run_training("other", **merged(DISTILL, {"teachers": [teacher], "steps": 2}))
    assert kl_curve(other) == pytest.approx(kl_curve(own), abs=1e-4)


@pytest.mark.slow
def test_each_environment_has_its_teacher(run_training, taught):
    teachers = [{"model": str(taught.path), "environments": ["arithmetic"]}, {"model": "ephebe"}]
    environments = [{"name": "arithmetic"}, {"name": "stockroom"}]
    run = run_training("two", **merged(DISTILL, {"teachers": teachers, "environments": environments, "steps": 1}))
    (row,) = run.read_metrics()
    assert row["env/stockroom/teacher_kl"] == pytest.approx(0.0, abs=1e-4)
    assert row["env/arithmetic/teacher_kl"] > 0.02


@pytest.mark.slow
def test_a_killed_distillation_resumes_on_the_undisturbed_curve(ephebe_url, tmp_path, monkeypatch, taught):
    monkeypatch.chdir(tmp_path)
    settings = merged(DISTILL, {"teachers": [{"model": f"{taught.path}@best"}], "server": ephebe_url, "steps": 4})
    (tmp_path / "run.json").write_text(json.dumps(merged(SMALL, settings)))
    code, said = train("run.json", "--name", "whole")
    assert code == 0, said
    assert "teacher KL" in said
    process = start(tmp_path, "run.json", "--name", "cut")
    wait_for_steps(tmp_path, "cut", 3, process)  # one step past its checkpoint
    kill(process)
    assert RunReader(tmp_path / "runs" / "cut").status() is RunStatus.KILLED
    code, said = train("--resume", "cut")
    assert code == 0, said
    whole, cut = (RunReader(tmp_path / "runs" / name) for name in ("whole", "cut"))
    assert [drawn_tokens(cut, step) for step in range(1, 5)] == [drawn_tokens(whole, step) for step in range(1, 5)]
    assert kl_curve(cut) == pytest.approx(kl_curve(whole), abs=1e-5)  # among other tenants of a server, not to the bit
    saved = RunCheckpoints(cut.path / "checkpoints", keep=1).newest()
    assert saved is not None
    assert next(iter(saved.teachers.values())).rpartition("@")[2].isdigit()


@pytest.mark.slow
def test_a_run_with_a_server_of_its_own_is_a_teacher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(merged(SMALL, {"steps": 2})))
    code, said = train("run.json", "--name", "first")
    assert code == 0, said
    changes = ["kind=distill", "teachers=[{model: first@best}]", "steps=1", "rollout.group_size=2"]
    code, said = train("run.json", "--name", "second", *changes)
    assert code == 0, said
    assert kl_curve(RunReader(tmp_path / "runs" / "second"))[0] != 0


# Refusals


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load_train_config([], [], {"kind": "distill", "environments": [{"name": "a"}, {"name": "b"}], **settings})
    return str(error.value)


def test_teachers_that_leave_an_environment_out_or_share_one_are_refused():
    assert "environment 'b' has no teacher" in refused(teachers=[{"model": "x", "environments": ["a"]}])
    both = [{"model": "x", "environments": ["a"]}, {"model": "y", "environments": ["a", "b"]}]
    assert "'a' already has a teacher" in refused(teachers=both)
    assert "both teach everywhere" in refused(teachers=[{"model": "x"}, {"model": "y"}])
    assert "no environment 'aa'; did you mean" in refused(teachers=[{"model": "x", "environments": ["aa"]}])
    assert "teachers" in refused()
    assert "set it to keep" in refused(teachers=[{"model": "x"}], data={"zero_variance": "refill"})


def test_a_teacher_with_another_tokenizer_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path, vocab_size=512, max_positions=4096)
    (tmp_path / "run.json").write_text(json.dumps(merged(SMALL, {"kind": "distill"})))
    teacher = f"teachers=[{{model: ephebe, tokenizer: {tmp_path}}}]"
    code, said = train("run.json", teacher, "--display", "none")
    assert code == 2
    assert "teachers[0] (ephebe): its tokenizer is not the student's (token " in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_an_endpoint_with_another_tokenizer_is_refused(ephebe_url):
    async def ask(model: str) -> None:
        teacher = TeacherConfig(model=model, endpoint=f"{ephebe_url}/v1")
        async with EndpointTeacher.open(teacher, DistillationConfig(patience_s=1)) as opened:
            await check_by_scores("teachers[0]", opened, chat_tokenizer())

    with pytest.raises(SetupError, match=r"teachers\[0\]: its tokenizer is not the student's|teachers\[0\]: teacher"):
        asyncio.run(ask("ephebe"))
    with pytest.raises(SetupError, match=r"teachers\[0\]: teacher nobody: .* answers 404"):
        asyncio.run(ask("nobody"))


def test_a_key_that_is_not_set_and_an_address_where_nobody_answers_are_told(monkeypatch):
    async def score(**more: Any) -> None:
        teacher = TeacherConfig(model="x", endpoint="http://127.0.0.1:9/v1", **more)
        async with EndpointTeacher.open(teacher, DistillationConfig(patience_s=0.3)) as opened:
            await opened.score([1, 2])

    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(SamplingError, match="NO_SUCH_KEY is not set"):
        asyncio.run(score(key_env="NO_SUCH_KEY"))
    with pytest.raises(SamplingError, match="does not answer"):
        asyncio.run(score())


def test_teachers_that_are_not_there_are_told_before_a_run_is_made(tmp_path: Path):
    def attempt(model: str, **more: Any) -> None:
        settings = merged(SMALL, {"kind": "distill", "teachers": [{"model": model}], "runs": str(tmp_path), **more})
        check(load_train_config([], [], settings))

    with pytest.raises(ValueError, match="is not a model folder"):
        attempt(str(tmp_path / "nowhere"))
