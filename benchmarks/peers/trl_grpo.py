"""TRL's GRPOTrainer in `time_to_reward`, run by a Python that has it.

LoRA is PEFT's, samples come from transformers' `generate`. Episodes are played by TRL's `rollout_func`, all rollouts of
a step turn by turn as one batch, with the environments' own code and texts; only what the policy said is trained
(`env_mask`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from peers.reward_job import ALPHA, BETAS, EPSILON, GRAD_CLIP, Job, Reporter

from palestra.chat import ChatTokenizer
from palestra.environments import make
from palestra.types.rollouts import Task

TASK = "task"
"""Key in the first message of a prompt: the task's place in the order, which `rollout_func` does not get otherwise."""


@dataclass
class Episode:
    env: Any
    prompt: list[int]
    completion: list[int] = field(default_factory=list)
    """What came after the prompt, by both sides."""
    is_sampled: list[int] = field(default_factory=list)
    """1 for tokens of the policy, 0 for those of the environment."""
    reward: float = 0.0
    is_over: bool = False

    @property
    def context(self) -> list[int]:
        return self.prompt + self.completion


class Rollouts:
    """TRL's `rollout_func`: plays a batch of prompts and counts."""

    def __init__(self, job: Job, tasks: list[Task]) -> None:
        self._tasks = tasks
        self._tokenizer = ChatTokenizer.load(Path(job.model))
        self.sampled = self.trained = 0
        self.reward = 0.0

    def __call__(self, prompts: list[list[dict[str, Any]]], trainer: Any) -> dict[str, Any]:
        episodes = [self._open(self._tasks[prompt[0][TASK]]) for prompt in prompts]
        while playing := [one for one in episodes if not one.is_over]:
            turns, _ = trainer._generate_single_turn([one.context for one in playing], None, {}, 1)
            for episode, tokens in zip(playing, turns, strict=True):
                self._step(episode, tokens)
        self.sampled += sum(sum(one.is_sampled) for one in episodes)
        self.trained += sum(len(one.context) for one in episodes)
        self.reward = sum(one.reward for one in episodes) / len(episodes)
        return {
            "prompt_ids": [one.prompt for one in episodes],
            "completion_ids": [one.completion for one in episodes],
            "logprobs": None,
            "env_mask": [one.is_sampled for one in episodes],
            "episode_reward": [one.reward for one in episodes],
        }

    def _open(self, task: Task) -> Episode:
        env: Any = make(task.environment, env_config={}, extras=dict(task.extras))
        messages, _ = env.init([dict(message) for message in task.prompt])
        return Episode(env, self._tokenizer.encode_chat(messages))

    def _step(self, episode: Episode, tokens: list[int]) -> None:
        """As a rollout of ours goes: a turn that was cut is graded, and ends it."""
        episode.completion += tokens
        episode.is_sampled += [1] * len(tokens)
        result = episode.env.step(self._tokenizer.decode(tokens))
        episode.reward += result["reward"]
        was_cut = tokens[-1] not in self._tokenizer.stop_ids
        episode.is_over = result["done"] or was_cut
        if not episode.is_over:
            read = self._tokenizer.observation(result["observations"])
            episode.completion += read
            episode.is_sampled += [0] * len(read)


def rewards(episode_reward: list[float], **_: Any) -> list[float]:
    return episode_reward


def trainer_of(job: Job, reporter: Reporter) -> Any:
    trl, peft, datasets = import_module("trl"), import_module("peft"), import_module("datasets")
    settings, tasks = job.settings, list(job.tasks())
    rollouts = Rollouts(job, tasks)
    prompts = [[{**message, TASK: place} for message in task.prompt] for place, task in enumerate(tasks)]
    on_gpu = job.device == "cuda"
    config = trl.GRPOConfig(
        output_dir=job.folder,
        max_steps=job.steps,
        seed=job.seed,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPSILON,
        max_grad_norm=GRAD_CLIP,
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=settings.groups * settings.samples // job.micro_batch,
        num_generations=settings.samples,
        max_completion_length=settings.max_tokens,
        temperature=1.0,
        mask_truncated_completions=True,  # as ours does
        shuffle_dataset=False,
        gradient_checkpointing=False,  # faster, and there is memory enough
        bf16=on_gpu,
        use_cpu=not on_gpu,
        save_strategy="no",
        report_to="none",
        logging_steps=1_000_000,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32"},
    )
    lora = peft.LoraConfig(
        r=settings.rank, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    trainer = trl.GRPOTrainer(
        job.model,
        reward_funcs=rewards,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        peft_config=lora,
        rollout_func=rollouts,
    )
    trainer.add_callback(_callback(job, reporter, rollouts))
    return trainer


def _callback(job: Job, reporter: Reporter, rollouts: Rollouts) -> Any:
    class Reports(import_module("transformers").TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            reporter.begin()

        def on_step_end(self, _: Any, state: Any, control: Any, model: Any = None, **__: Any) -> None:
            if state.global_step % job.every:
                return
            paused_at, adapter = time.monotonic(), Path(job.folder) / f"adapter-{state.global_step}"
            model.save_pretrained(adapter)
            counts = {"sampled": rollouts.sampled, "trained": rollouts.trained}
            if not reporter.report(state.global_step, adapter, paused_at=paused_at, reward=rollouts.reward, **counts):
                control.should_training_stop = True

    return Reports()


def main() -> None:
    job, reporter = Reporter.open()
    trainer_of(job, reporter).train()


if __name__ == "__main__":
    main()
