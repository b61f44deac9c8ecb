"""Configs of NeMo RL's, as `palestra train` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from palestra.cli.app import main
from palestra.config.train import load_train_config
from palestra.gym.config.values import GymOverride
from palestra.gym.errors import GymConfigError
from palestra.gym.nemo_rl.run_config import translated
from palestra.gym.nemo_rl.run_config_file import read_nemo_rl_config

BASE = """
grpo:
  num_prompts_per_step: 4
  num_generations_per_prompt: 8
  max_num_steps: 1000000
  max_num_epochs: 2
  normalize_rewards: true
  val_period: 10
  val_at_start: false
  overlong_filtering: true
  seed: 42
  async_grpo: {enabled: true, max_trajectory_age_steps: 2, in_flight_weight_updates: false}
  invalid_tool_call_advantage: -5.0
loss_fn:
  ratio_clip_min: 0.2
  ratio_clip_max: 0.28
  token_level_loss: true
  truncated_importance_sampling_ratio: 5
  reference_policy_kl_penalty: 0
policy:
  model_name: someone/large
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: ${div:${mul:${grpo.num_prompts_per_step}, ${grpo.num_generations_per_prompt}}, 2}
  max_total_sequence_length: 512
  max_grad_norm: 1.0
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 8}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.999], eps: 1e-8}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 50}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}
    - milestones: [50]
  generation:
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    temperature: 1.0
    top_k: null
    val_temperature: ${.temperature}
    vllm_cfg: {async_engine: true, expose_http_server: true}
checkpointing: {enabled: true, metric_name: "val:accuracy", keep_top_k: 3, save_period: 6}
logger: {wandb_enabled: true, wandb: {project: p, name: n}}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""
CHILD = """
defaults: base.yaml
policy: {model_name: ephebe}
data: {train: {data_path: rows.jsonl}, validation: {data_path: rows.jsonl}, shuffle: false}
env:
  should_use_nemo_gym: true
  should_log_nemo_gym_responses: true
  nemo_gym:
    config_paths:
      - resources_servers/math_with_judge/configs/math_with_judge.yaml
      - responses_api_models/vllm_model/configs/vllm_model_for_training.yaml
    math_with_judge: {resources_servers: {math_with_judge: {symbolic: false, answer_from: last_number}}}
    is_trajectory_collection: false
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    row = {"responses_create_params": {"input": "1 + 1?"}, "agent_ref": {"name": "math_with_judge_simple_agent"}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 10)
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "run.yaml").write_text(CHILD)
    return tmp_path / "run.yaml"


def palestra(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments], prog_name="palestra")


def test_a_translated_config_has_the_same_settings(run_file: Path) -> None:
    done = palestra("config", "from-nemo-rl", run_file)
    assert done.exit_code == 0, done.output
    (run_file.parent / "ours.yaml").write_text(done.stdout)
    config: Any = load_train_config([run_file.parent / "ours.yaml"], [])
    assert (config.model.name, config.seed, config.steps) == ("ephebe", 42, 6)  # two epochs of ten rows, four a step
    assert (config.rollout.group_size, config.rollout.groups_per_step, config.rollout.max_tokens) == (8, 4, 512)
    assert (config.algorithm.advantage, config.algorithm.loss, config.algorithm.minibatches) == ("grpo", "ppo", 2)
    assert config.algorithm.loss_config == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
    assert config.algorithm.correction.truncate == 5
    assert (config.asynchronous.enabled, config.asynchronous.max_staleness) == (True, 2)
    assert (config.optimizer.lr, config.optimizer.beta2, config.optimizer.warmup_steps) == ("auto", 0.999, 50)
    assert (config.checkpoint.every, config.checkpoint.keep_best) == (6, "eval/reward_mean")
    assert config.trackers[0].options == {"project": "p", "name": "n"}
    (gym,) = config.environments
    assert (gym.name, gym.shuffle, len(gym.config["files"])) == ("gym", False, 2)
    overrides = {one.key: one.value for one in map(GymOverride.parse, gym.config["overrides"])}
    world = "math_with_judge.resources_servers.math_with_judge"
    assert overrides == {f"{world}.symbolic": False, f"{world}.answer_from": "last_number"}


@pytest.mark.slow
def test_a_translated_config_passes_the_checks_of_a_run(run_file: Path) -> None:
    (run_file.parent / "ours.yaml").write_text(palestra("config", "from-nemo-rl", run_file).stdout)
    checked = palestra("train", run_file.parent / "ours.yaml", "trackers=[]", "--dry-run")
    assert checked.exit_code == 0, checked.output


def test_what_has_no_counterpart_is_named(run_file: Path) -> None:
    done = palestra("config", "from-nemo-rl", run_file)
    named = [line.split(": ")[1] for line in done.stderr.splitlines() if line.startswith("without a counterpart")]
    lost = ["policy.optimizer.kwargs.lr", "grpo.val_at_start", "grpo.invalid_tool_call_advantage"]
    assert named == lost
    assert all(f"#   {key}: " in done.stdout for key in lost)
    spared = done.stderr.splitlines()[-1]
    assert spared.startswith("not needed here")
    assert "policy.megatron_cfg" in spared


def test_every_key_is_translated_or_named(run_file: Path) -> None:
    given = read_nemo_rl_config(run_file)
    given["grpo"]["new_in_a_later_version"] = 3
    given["env"]["nemo_gym"]["require_routed_experts"] = True
    found = translated(given)
    assert found.lost["grpo.new_in_a_later_version"] == "no counterpart"
    assert "env.nemo_gym.require_routed_experts" in found.lost
    assert yaml.safe_load(found.text("run.yaml")) == found.config


def test_what_a_config_leaves_out_is_not_named(run_file: Path) -> None:
    given = read_nemo_rl_config(run_file)
    del given["policy"]["optimizer"]
    assert not [key for key in translated(given).lost if key.startswith("policy.optimizer")]


def test_text_of_a_gym_survives_its_override(run_file: Path) -> None:
    given = read_nemo_rl_config(run_file)
    odd = {"text": "it's \\ here, {a}", "list": [1, None, {"b c": True}], "none": None, "empty": {}}
    given["env"]["nemo_gym"]["math_with_judge"] = odd
    overrides = map(GymOverride.parse, translated(given).config["environments"][0]["config"]["overrides"])
    assert {one.key.rpartition(".")[2]: one.value for one in overrides} == odd


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"env": {"should_use_nemo_gym": False}}, "only runs over NeMo Gym"),
        ({"on_policy_distillation": {"teachers": 1}}, "only GRPO"),
        ({"grpo": None}, "no section grpo.* the whole config"),
    ],
)
def test_other_runs_are_refused(run_file: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(GymConfigError, match=problem):
        translated(read_nemo_rl_config(run_file) | change)


def test_train_says_how_to_translate(run_file: Path) -> None:
    done = palestra("train", run_file, "--dry-run")
    assert done.exit_code == 2
    assert f"palestra config from-nemo-rl {run_file}" in done.output
