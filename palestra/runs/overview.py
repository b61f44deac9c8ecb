"""A run in one row, as `palestra run list` and the dashboard show it."""

from __future__ import annotations

from msgspec import to_builtins

from palestra.runs.metric_table import MetricTable, read_table
from palestra.runs.reader import RunReader
from palestra.runs.record_files import RunError
from palestra.util.json_types import JsonObject

EVALUATIONS = ("eval/success", "eval/loss")


def model_name(config: JsonObject) -> str | None:
    """The model's name in the config of a training run or an evaluation."""
    model = config.get("model")
    return model.get("name") if isinstance(model, dict) else model


def overview(one: RunReader, table: MetricTable | None = None) -> JsonObject:
    """A run in one row; `table` are its metrics, if they were read already. A run that cannot be read gets a row with
    the reason, so that the others are still listed."""
    row: JsonObject = {"name": one.name, "path": str(one.path), "status": "damaged", "kind": None, "model": None}
    row |= {"created": None, "last_step": None, "steps": None, "reward_mean": None}
    row |= {"eval_success": None, "eval_loss": None, "eval_step": None, "tags": [], "notes": []}
    try:
        about, table = one.read_about(), table or read_table(one.metrics_file)
        row |= to_builtins(one.read_labels())
        row |= {
            "status": str(one.status()),
            "kind": about["kind"],
            "model": model_name(about["config"]),
            "created": about["created"],
            "last_step": table.steps[-1] if table.steps else None,
            "steps": about["config"].get("steps"),
            "reward_mean": table.last("reward/mean"),
            "eval_success": table.last("eval/success"),
            "eval_loss": table.last("eval/loss"),
            "eval_step": table.last_step(*EVALUATIONS),
        }
    except (RunError, KeyError, AttributeError, TypeError, ValueError) as error:
        row["error"] = f"{type(error).__name__}: {error}"
    return row


def is_labelled(row: JsonObject, tags: tuple[str, ...], note: str | None) -> bool:
    return set(tags) <= set(row["tags"]) and (note is None or any(note in one["text"] for one in row["notes"]))


def last_values(metrics: list[JsonObject]) -> JsonObject:
    """The newest value of each metric, since not every row has an evaluation."""
    newest: JsonObject = {}
    for row in metrics:
        newest |= {name: value for name, value in row.items() if value is not None}
    return {name: value for name, value in newest.items() if name not in ("time", "attempt")}
