"""Metrics of rollouts: per task, over all, pass@k and majority@k. Begin at `aggregate`."""

from palestra.gym.metrics.aggregate import RolloutMetrics, aggregate, by_task
from palestra.gym.metrics.passes import highest_k, pass_metrics, subset_metrics

__all__ = ["RolloutMetrics", "aggregate", "by_task", "highest_k", "pass_metrics", "subset_metrics"]
