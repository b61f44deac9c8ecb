"""The recipes that `make cookbook` runs: what is typed, and what their metrics must show."""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "Qwen/Qwen3-8B"  # a name the cookbook knows a renderer for; what the server has behind it is small and random
SEEING = "Qwen/Qwen3.5-4B"  # the same for one that sees
FAMILIES = {MODEL: "qwen3", SEEING: "qwen3_5_vl"}
"""What is behind these names: random models of these families."""

CHECKPOINT = "{checkpoint}"  # in an argument: the state the first recipe saved


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    module: str
    args: tuple[str, ...]
    steps: int
    shows: tuple[str, ...]
    """Metrics that every step must have, as finite numbers."""
    model: str = MODEL

    @property
    def typed(self) -> str:
        return " ".join(["python -m", self.module, *self.args])


def recipe(name: str, module: str, args: str, *, shows: str, steps: int, model: str = MODEL) -> Recipe:
    given = (f"model_name={model}", *args.split(), f"max_steps={steps}")
    return Recipe(name, f"tinker_cookbook.recipes.{module}", given, steps, tuple(shows.split()), model)


RL = "env/all/reward/total optim/kl_sample_train_v1"
SL = "train_mean_nll"

FIRST = (
    recipe("sl_loop", "sl_loop", "batch_size=8", steps=3, shows=SL),
    recipe(
        "math_rl",
        "math_rl.train",
        "env=arithmetic groups_per_batch=4 group_size=4 max_tokens=16",
        steps=2,
        shows=RL,
    ),
)

MORE = (
    recipe("rl_loop", "rl_loop", "batch_size=4 group_size=4 max_tokens=16", steps=2, shows="reward/total"),
    recipe("sl_basic", "sl_basic", "", steps=2, shows=SL),
    recipe("rl_basic", "rl_basic", "max_tokens=4", steps=1, shows=RL),  # 128 prompts x 16 samples, by its own settings
    recipe("dpo", "preference.dpo.train", "batch_size=8", steps=2, shows="dpo_loss accuracy"),
    recipe(
        "on_policy_distillation",
        "distillation.on_policy_distillation",
        f"teacher_model={MODEL} groups_per_batch=4 group_size=2 max_tokens=16 lora_rank=8",
        steps=2,
        shows="teacher_kl",
    ),
    recipe(
        "off_policy_reasoning",
        "distillation.off_policy_reasoning",
        "renderer_name=qwen3 batch_size=8 max_prompts=32 lora_rank=8",
        steps=2,
        shows=SL,
    ),
    recipe(
        "sdft",
        "sdft.train",
        "groups_per_batch=4 max_tokens=16 lora_rank=8 eval_every=0",
        steps=2,
        shows="sdft/mean_teacher_entropy",
    ),
    recipe(
        "guess_number",
        "multiplayer_rl.guess_number.train",
        "renderer_name=qwen3_disable_thinking batch_size=2 group_size=2 max_tokens=8 eval_every=0",
        steps=2,
        shows=RL,
    ),
    recipe(
        "shorter",
        "preference.shorter.train",
        "renderer_name=qwen3_disable_thinking batch_size=2 group_size=4 max_tokens=8",
        steps=2,
        shows=RL,
    ),
    recipe(
        "chat_sl, rolling checkpoints",
        "chat_sl.train",
        "batch_size=8 rolling_save_every=1 save_every=2 eval_every=2",
        steps=4,
        shows=SL,
    ),
    recipe(
        "math_rl, off-policy",
        "math_rl.train",
        "env=arithmetic groups_per_batch=4 group_size=4 max_tokens=16 max_steps_off_policy=2 loss_fn=ppo",
        steps=3,
        shows=RL,
    ),
    recipe(
        "math_rl, from the checkpoint of sl_loop",
        "math_rl.train",
        f"env=arithmetic groups_per_batch=4 group_size=4 max_tokens=16 load_checkpoint_path={CHECKPOINT}",
        steps=2,
        shows=RL,
    ),
    recipe(
        "vlm_classifier",
        "vlm_classifier.train",
        "experiment_dir=runs/vlm_classifier batch_size=8 n_eval=8 max_tokens=16 eval_every=2 lora_rank=8",
        steps=3,
        shows=SL,
        model=SEEING,
    ),
)
