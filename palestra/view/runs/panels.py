"""The charts of a run's page, in four rows: learning, health, behaviour, speed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache

from msgspec import Struct


class ChartPanel(Struct, frozen=True):
    """A chart. In names of metrics `*` stands for one part of a name."""

    title: str
    lines: tuple[str, ...]
    band: tuple[str, str] | None = None
    """Metrics of the lower and upper edge of the shaded band."""
    is_stacked: bool = False
    is_share: bool = False
    """Whether the axis goes from 0 to 1."""
    hides_zeros: bool = False
    """Lines that are 0 throughout are left out."""
    least_lines: int = 1
    """Number of lines below which the chart is not drawn."""


class PanelRow(Struct, frozen=True):
    title: str
    question: str
    panels: tuple[ChartPanel, ...]


ROWS = (
    PanelRow(
        "Learning",
        "Is it getting better?",
        (
            ChartPanel("Reward", ("reward/mean", "reward/best_of_group"), band=("reward/p10", "reward/p90")),
            ChartPanel("Evaluation", ("eval/success", "eval/pass_at_*", "eval/reward_mean"), is_share=True),
            ChartPanel("Loss", ("loss/mean", "eval/loss")),
            ChartPanel("KL from the teacher", ("kl/teacher", "env/*/teacher_kl")),
            ChartPanel("Pairs ranked right", ("dpo/accuracy",), is_share=True),
            ChartPanel("Margin of pairs", ("dpo/margin", "dpo/chosen_reward", "dpo/rejected_reward")),
            ChartPanel("Rewards of answers", ("kto/desirable_reward", "kto/undesirable_reward")),
            ChartPanel(
                "Evaluation by environment and level",
                ("eval/*/success", "eval/*/*/success"),
                is_share=True,
                least_lines=2,
            ),
        ),
    ),
    PanelRow(
        "Health",
        "Is the policy in good order?",
        (
            ChartPanel("Sampler and trainer", ("kl/sampler_trainer_k3", "mismatch/logprob_abs_mean")),
            ChartPanel("Entropy", ("policy/entropy_estimate",)),
            ChartPanel("KL from the base model", ("kl/base",)),
            ChartPanel("Gradient norm", ("optim/grad_norm", "optim/grad_norm_max")),
            ChartPanel("Clipped tokens", ("policy/clip_fraction",), hides_zeros=True),
            ChartPanel("Zero-variance groups", ("rollouts/zero_variance_share",), is_share=True),
        ),
    ),
    PanelRow(
        "Behaviour",
        "What does it do?",
        (
            ChartPanel("Length in tokens", ("length/mean", "length/max")),
            ChartPanel("Turns", ("turns/mean",)),
            ChartPanel("Stop reasons", ("stop/*",), is_stacked=True, is_share=True, hides_zeros=True),
            ChartPanel("Failed rollouts", ("rollouts/failed", "rollouts/ungraded"), hides_zeros=True),
            ChartPanel(
                "Errors of format and tools",
                ("env/*/parse_error", "env/*/parse_error_rate", "env/*/tool_error_rate", "env/*/tool_errors"),
                hides_zeros=True,
            ),
            ChartPanel("Reward by environment and level", ("env/*/reward", "env/*/*/reward"), least_lines=2),
        ),
    ),
    PanelRow(
        "Speed",
        "Where does the time go?",
        (
            ChartPanel(
                "Seconds of a step",
                ("time/collect_s", "time/score_s", "time/update_s", "time/sync_s", "time/eval_s"),
                is_stacked=True,
                hides_zeros=True,
            ),
            ChartPanel(
                "Tokens per second",
                ("throughput/total_tokens_per_s", "throughput/collect_tokens_per_s", "throughput/update_tokens_per_s"),
            ),
            ChartPanel("Share of a step in which the trainer waits", ("time/idle_share",)),
            ChartPanel("Seconds of a rollout", ("time/rollout_mean_s", "time/rollout_max_s")),
            ChartPanel("Staleness in versions", ("staleness/mean", "staleness/max"), hides_zeros=True),
            ChartPanel("Waiting for players", ("episodes/wait_mean_s",)),
        ),
    ),
)


def matching(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """The names that fit, in the order of the patterns."""
    known = list(names)
    found = {name: None for pattern in patterns for name in known if _pattern(pattern).fullmatch(name)}
    return list(found)


@cache
def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(map(re.escape, pattern.split("*"))))
