"""Scores of evaluations as one table: a line for each model, a column for each environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from palestra.config.evaluate import EvaluationConfig
from palestra.rollouts.group_metrics import metric_name
from palestra.types.rollouts import CODING


class Score(Struct, frozen=True, kw_only=True):
    """pass@k of an environment, with a 95% interval."""

    benchmark: str
    k: int
    value: float
    low: float
    high: float
    tasks: int
    """Number of tasks that were played."""

    @property
    def title(self) -> str:
        return f"{self.benchmark} pass@{self.k}"

    @property
    def text(self) -> str:
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


class ScoredModel(Struct, frozen=True, kw_only=True):
    """A model with its scores."""

    model: str
    folder: str
    scores: list[Score]


def scores_of(config: EvaluationConfig, metrics: Mapping[str, float]) -> list[Score]:
    """Returns the scores of an evaluation, in the order of its environments, from its metrics."""
    found = []
    for entry in config.environments:
        area = f"eval/{metric_name(entry.name)}"
        pattern = re.compile(rf"{re.escape(area)}/pass_at_(\d+)")
        for name in metrics:
            if (k := pattern.fullmatch(name)) is None:
                continue
            score = Score(
                benchmark=str(entry.extras.get("data_source", CODING)) if entry.name == CODING else entry.name,
                k=int(k[1]),
                value=metrics[name],
                low=metrics[f"{name}_low"],
                high=metrics[f"{name}_high"],
                tasks=round(metrics[f"{area}/tasks"]),
            )
            found.append(score)
    return found


def table_text(models: Sequence[ScoredModel]) -> str:
    """A model that has no score for a column, such as one that was not played to its end, has a dash there."""
    titles = list(dict.fromkeys(score.title for one in models for score in one.scores))
    lines = [["model", *titles]]
    for one in models:
        texts = {score.title: score.text for score in one.scores}
        lines.append([one.model, *(texts.get(title, "-") for title in titles)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join([*padded, "pass@k, with the 95% interval over tasks (Wilson)"])
