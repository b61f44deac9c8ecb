"""A config of NeMo RL's as one of `palestra train`.

A key is translated, or it is named: with what is lost by it, or as one that is not needed here. Keys that are off are
left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from palestra.gym.config.merging import dotted, leaves
from palestra.gym.errors import GymConfigError
from palestra.gym.nemo_rl.run_config_keys import NOT_NEEDED, VALIDATION
from palestra.gym.nemo_rl.settings import TRAINERS_OWN, UNSUPPORTED, WITHOUT_EFFECT
from palestra.util.json_types import JsonObject

ALL_TASKS = 1_000_000
PLAIN_KEY = re.compile(r"[\w-]+")


@dataclass(slots=True)
class TranslatedRun:
    config: JsonObject
    """The config for `palestra train`."""
    lost: dict[str, str] = field(default_factory=dict)
    """Keys without a counterpart, or with another meaning here, and what differs."""
    not_needed: dict[str, str] = field(default_factory=dict)

    def text(self, source: str) -> str:
        """Returns the config as YAML; what is not in it stands above, as comments."""
        lines = [f"From {source}, by palestra config from-nemo-rl."]
        lines += ["Without a counterpart here:"] if self.lost else []
        lines += [f"  {key}: {why}" for key, why in self.lost.items()]
        head = "".join(f"# {line}\n" for line in lines)
        return head + yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True, width=120)


def translated(given: JsonObject) -> TranslatedRun:
    """Translates a config that was read. Raises GymConfigError if it does not use a gym."""
    return _Translation(given).run()


class _Translation:
    def __init__(self, given: JsonObject) -> None:
        self._given = given
        self._taken: set[str] = set()
        self._out = TranslatedRun({"kind": "grpo"})

    def run(self) -> TranslatedRun:
        if self._take("env.should_use_nemo_gym") is not True:
            raise GymConfigError("env.should_use_nemo_gym is not true: only runs over NeMo Gym can be translated")
        if self._peek("on_policy_distillation") or self._peek("distillation"):
            raise GymConfigError("only GRPO can be translated; for distillation, write a config with kind: distill")
        if not isinstance(self._peek("grpo"), dict):
            raise GymConfigError(
                "there is no section grpo, which says what a step is; give the whole config of a GRPO run, with the "
                "files that it names under defaults"
            )
        self._set("seed", self._take("grpo.seed"))
        self._set("model.name", self._take("policy.model_name"))
        self._tokenizer()
        self._gym()
        self._steps()
        self._rollouts()
        self._algorithm()
        self._optimizer()
        self._evaluation()
        self._checkpoints()
        self._trackers()
        self._name_the_rest()
        return self._out

    # Reading and writing keys

    def _peek(self, key: str) -> Any:
        node: Any = self._given
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def _take(self, key: str) -> Any:
        self._taken.add(key)
        return self._peek(key)

    def _set(self, key: str, value: object) -> None:
        if value is None:
            return
        *parts, last = key.split(".")
        node = self._out.config
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = value

    def _lose(self, key: str, why: str) -> None:
        self._take(key)
        self._out.lost[key] = why

    # Parts of a config

    def _tokenizer(self) -> None:
        name = self._take("policy.tokenizer.name")
        if name not in (None, self._peek("policy.model_name")):
            self._set("model.tokenizer", name)
        if self._peek("policy.tokenizer.chat_template_kwargs"):
            why = "set extra_body.chat_template_kwargs of the gym's model server"
            self._lose("policy.tokenizer.chat_template_kwargs", why)

    def _gym(self) -> None:
        gym = self._peek("env.nemo_gym") or {}
        config: JsonObject = {"files": [str(one) for one in self._take("env.nemo_gym.config_paths") or []]}
        own = {
            *TRAINERS_OWN,
            *UNSUPPORTED,
            *WITHOUT_EFFECT,
            "config_paths",
            "invalid_tool_call_patterns",
            "thinking_tags",
        }
        overrides = [line for key, value in gym.items() if key not in own for line in _overrides(key, value)]
        self._taken |= {f"env.nemo_gym.{key}" for key in gym if key not in own}
        if overrides:
            config["overrides"] = overrides
        entry: JsonObject = {"name": "gym", "config": config}
        for ours, theirs, older in (
            ("tasks", "data.train", "data.train_jsonl_fpath"),
            ("eval_tasks", "data.validation", "data.validation_jsonl_fpath"),
        ):
            if (path := self._data_file(theirs) or self._take(older)) is not None:
                entry[ours] = path
        if (shuffle := self._take("data.shuffle")) is not None:
            entry["shuffle"] = shuffle
        self._out.config["environments"] = [entry]
        if self._take("env.should_mask_flagged_samples") is False:
            self._lose("env.should_mask_flagged_samples", "what a verifier flags is always left out")

    def _data_file(self, key: str) -> str | None:
        given = self._peek(key)
        if isinstance(given, list):
            self._lose(key, "several files; join them into one, or write an entry of environments for each")
            return None
        return self._take(f"{key}.data_path")

    def _steps(self) -> None:
        steps, epochs = self._take("grpo.max_num_steps"), self._take("grpo.max_num_epochs")
        rows = _row_count(self._out.config["environments"][0].get("tasks"))
        if epochs is not None and rows is not None:
            each = -(-rows // (self._peek("grpo.num_prompts_per_step") or 1))
            steps = min(steps or ALL_TASKS, max(1, each * epochs))
        elif epochs is not None:
            self._lose("grpo.max_num_epochs", "the training file is not there to count its rows: set steps")
        self._set("steps", steps)

    def _rollouts(self) -> None:
        self._set("rollout.group_size", self._take("grpo.num_generations_per_prompt"))
        self._set("rollout.groups_per_step", self._take("grpo.num_prompts_per_step"))
        length = self._take("policy.max_total_sequence_length")
        self._set("rollout.max_context", length)
        self._set("data.max_sequence_length", length)
        for ours, theirs in (("max_tokens", "max_new_tokens"), ("temperature", "temperature"), ("top_p", "top_p")):
            self._set(f"rollout.{ours}", self._take(f"policy.generation.{theirs}"))
        self._set("rollout.top_k", self._take("policy.generation.top_k"))
        for key in ("stop_token_ids", "stop_strings"):
            if self._peek(f"policy.generation.{key}"):
                self._lose(f"policy.generation.{key}", "the rows and the gym's agent say where to stop")
        if (overlong := self._take("grpo.overlong_filtering")) is not None:
            self._set("rollout.endings.length", "mask" if overlong else "grade")
        if self._take("grpo.use_dynamic_sampling"):
            self._set("data.zero_variance", "refill")
            self._set("data.max_refills", self._take("grpo.dynamic_sampling_max_gen_batches"))
        else:
            self._set("data.zero_variance", "keep")
        if self._peek("grpo.reward_shaping.enabled"):
            self._set("penalty.length", self._take("grpo.reward_shaping.overlong_buffer_penalty"))
            self._set("penalty.length_window", self._take("grpo.reward_shaping.overlong_buffer_length"))
            if self._peek("grpo.reward_shaping.stop_properly_penalty_coef"):
                self._lose(
                    "grpo.reward_shaping.stop_properly_penalty_coef", "see penalty.cut, which subtracts a constant"
                )
        if self._take("grpo.batch_multiplier") not in (None, 1):
            self._lose("grpo.batch_multiplier", "groups beyond a step's own are played with data.zero_variance: refill")
        if self._peek("grpo.reward_scaling.enabled"):
            self._lose("grpo.reward_scaling", "rewards are taken as they are")
        if self._peek("grpo.async_grpo.enabled"):
            self._set("asynchronous.enabled", self._take("grpo.async_grpo.enabled"))
            self._set("asynchronous.max_staleness", self._take("grpo.async_grpo.max_trajectory_age_steps"))

    def _algorithm(self) -> None:
        estimator = self._take("grpo.adv_estimator.name") or "grpo"
        if estimator != "grpo":
            self._lose("grpo.adv_estimator.name", f"{estimator} is not among algorithm.advantage")
        is_divided = self._either("normalize_rewards")
        is_left_out = self._either("use_leave_one_out_baseline")
        self._set("algorithm.advantage", "grpo" if is_divided else "leave_one_out" if is_left_out else "mean_baseline")
        if is_divided and is_left_out:
            self._lose("grpo.use_leave_one_out_baseline", "grpo compares with the mean of the whole group")
        self._loss()
        if (is_by_token := self._take("loss_fn.token_level_loss")) is not None:
            self._set("algorithm.normalize", "tokens" if is_by_token else "sequences")
        played = (self._peek("grpo.num_prompts_per_step") or 1) * (self._peek("grpo.num_generations_per_prompt") or 1)
        batch = self._take("policy.train_global_batch_size")
        if batch and batch < played:
            self._set("algorithm.minibatches", int(played // batch))
        if penalty := self._take("loss_fn.reference_policy_kl_penalty"):
            self._set("penalty.kl", penalty)
            for key in ("reference_policy_kl_type", "kl_input_clamp_value", "kl_output_clamp_value"):
                if self._peek(f"loss_fn.{key}") is not None:
                    self._lose(f"loss_fn.{key}", "penalty.kl subtracts the logprob ratio from each token's advantage")

    def _either(self, key: str) -> bool:
        """Whether it is set for the estimator, or else for the run."""
        own, general = self._take(f"grpo.adv_estimator.{key}"), self._take(f"grpo.{key}")
        return bool(general if own is None else own)

    def _loss(self) -> None:
        is_by_sequence = self._take("loss_fn.sequence_level_importance_ratios")
        self._set("algorithm.loss", "gspo" if is_by_sequence else "ppo")
        low, high = self._take("loss_fn.ratio_clip_min"), self._take("loss_fn.ratio_clip_max")
        self._set("algorithm.loss_config.clip_low_threshold", None if low is None else round(1 - low, 9))
        self._set("algorithm.loss_config.clip_high_threshold", None if high is None else round(1 + high, 9))
        if dual := self._take("loss_fn.ratio_clip_c"):
            self._set("algorithm.loss_config.dual_clip", dual)
        ratio, lowest = (self._take(f"loss_fn.truncated_importance_sampling_ratio{end}") for end in ("", "_min"))
        kind = self._peek("loss_fn.truncated_importance_sampling_type") or "tis"
        if ratio is None:
            return
        if kind == "tis":
            self._set("algorithm.correction.truncate", ratio)
        elif kind == "icepop":
            self._set("algorithm.correction.token_mask", [lowest or 0.0, ratio])
        else:
            self._lose("loss_fn.truncated_importance_sampling_type", f"{kind} is not among algorithm.correction")

    def _optimizer(self) -> None:
        self._set("optimizer.grad_clip", self._take("policy.max_grad_norm"))
        is_megatron = bool(self._peek("policy.megatron_cfg.enabled"))
        adapter = "policy.megatron_cfg.peft" if is_megatron else "policy.dtensor_cfg.lora_cfg"
        place = "policy.megatron_cfg.optimizer" if is_megatron else "policy.optimizer.kwargs"
        rate = self._take(f"{place}.lr")
        if self._peek(f"{adapter}.enabled"):
            self._set("model.rank", self._take(f"{adapter}.dim"))
            self._set("optimizer.lr", rate)
        elif rate is not None:
            self._lose(f"{place}.lr", f"{rate} is for all weights; here an adapter is trained, with optimizer.lr: auto")
        betas = self._take(f"{place}.betas") or [self._take(f"{place}.adam_beta{one}") for one in (1, 2)]
        self._set("optimizer.beta1", betas[0])
        self._set("optimizer.beta2", betas[1])
        self._set("optimizer.eps", self._take(f"{place}.{'adam_eps' if is_megatron else 'eps'}"))
        self._set("optimizer.weight_decay", self._take(f"{place}.weight_decay"))
        self._schedule(is_megatron)
        self._taken |= {"policy.optimizer", "policy.scheduler"}

    def _schedule(self, is_megatron: bool) -> None:
        if is_megatron:
            place = "policy.megatron_cfg.scheduler"
            self._set("optimizer.warmup_steps", self._take(f"{place}.lr_warmup_iters"))
            style = self._take(f"{place}.lr_decay_style") or "constant"
        else:
            stages = [one for one in self._peek("policy.scheduler") or [] if isinstance(one, dict) and "name" in one]
            kinds = {str(one["name"]).rpartition(".")[2]: one.get("kwargs") or {} for one in stages}
            self._set("optimizer.warmup_steps", (kinds.get("LinearLR") or {}).get("total_iters", 0))
            style = "cosine" if "CosineAnnealingLR" in kinds else "constant"
        if style in ("constant", "linear", "cosine"):
            self._set("optimizer.schedule", style)
        else:
            self._lose("policy.megatron_cfg.scheduler.lr_decay_style", f"{style} is not among optimizer.schedule")

    def _evaluation(self) -> None:
        period = self._take("grpo.val_period")
        if period is not None:
            self._set("eval.every", max(0, period))
        for key in ("grpo.val_at_start", "grpo.val_at_end"):
            if self._take(key) is False and (period or 0) > 0:
                self._lose(key, "there is always an evaluation before the first step and after the last")
        self._taken.add("grpo.val_start_at")
        if (self._peek("grpo.val_start_at") or -1) > 0:
            self._lose("grpo.val_start_at", "evaluations begin at once")
        self._set("eval.samples", self._take("grpo.val_num_generations_per_prompt"))
        self._set("eval.tasks", self._take("grpo.max_val_samples") or ALL_TASKS)
        self._set("eval.temperature", self._take("policy.generation.val_temperature"))
        for key in ("top_p", "top_k"):
            if self._take(f"policy.generation.val_{key}") not in (None, self._peek(f"policy.generation.{key}")):
                self._lose(f"policy.generation.val_{key}", f"evaluations sample with rollout.{key}")
        metric, bound = self._take("grpo.stop_at_validation_metric"), self._take("grpo.stop_at_validation_threshold")
        if metric is not None and metric in VALIDATION:
            self._set("early_stop", {"metric": VALIDATION[metric], "at_least": bound})
        elif metric is not None:
            self._lose("grpo.stop_at_validation_metric", f"{metric} is not a metric here; see early_stop.metric")

    def _checkpoints(self) -> None:
        self._set("checkpoint.every", self._take("checkpointing.save_period"))
        self._set("checkpoint.keep", self._take("checkpointing.keep_top_k"))
        kind, _, name = str(self._take("checkpointing.metric_name") or "").partition(":")
        if kind == "val" and name in VALIDATION:
            self._set("checkpoint.keep_best", VALIDATION[name])
        elif kind:
            self._lose("checkpointing.metric_name", "checkpoint.keep_best takes a metric of evaluations")

    def _trackers(self) -> None:
        trackers: list[JsonObject] = []
        for kind in ("wandb", "mlflow", "tensorboard"):
            if self._take(f"logger.{kind}_enabled"):
                options = {key: self._peek(f"logger.{kind}.{key}") for key in ("project", "name", "experiment_name")}
                options = {key: value for key, value in options.items() if value is not None}
                trackers.append({"kind": kind, **({"options": options} if options else {})})
        if self._peek("logger.swanlab_enabled"):
            self._lose("logger.swanlab_enabled", "it is not among trackers")
        if trackers:
            self._out.config["trackers"] = trackers

    def _name_the_rest(self) -> None:
        for path, value in leaves(self._given):
            key = dotted(tuple(part for part in path if isinstance(part, str)))
            if value in (None, False, "", -1) or value == {} or value == [] or self._is_known(key):
                continue
            reason = next((NOT_NEEDED[one] for one in _prefixes(key) if one in NOT_NEEDED), None)
            if reason is None:
                self._out.lost[key] = "no counterpart"
            else:
                self._out.not_needed[key] = reason

    def _is_known(self, key: str) -> bool:
        known = self._taken | set(self._out.lost)
        return any(one in known for one in _prefixes(key))


def _prefixes(key: str) -> Iterator[str]:
    parts = key.split(".")
    yield from (".".join(parts[:length]) for length in range(len(parts), 0, -1))


def _row_count(path: str | None) -> int | None:
    if path is None or not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        return sum(1 for line in file if line.strip())


def _overrides(key: str, value: Any) -> Iterator[str]:
    """Yields overrides of a gym, in Hydra's grammar."""
    if isinstance(value, dict) and value and all(PLAIN_KEY.fullmatch(str(name)) for name in value):
        for name, inner in value.items():
            yield from _overrides(f"{key}.{name}", inner)
    else:
        yield f"++{key}={_hydra(value)}"


def _hydra(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return "{" + ",".join(f"{_hydra(str(key))}:{_hydra(inner)}" for key, inner in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_hydra, value)) + "]"
        case str():
            return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        case _:
            return str(value)
