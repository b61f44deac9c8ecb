"""The model card of a published checkpoint, written from its run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from palestra import __version__
from palestra.checkpoints import SavedCheckpoint
from palestra.config.card import CardConfig
from palestra.config.redaction import redact
from palestra.runs.export_form import PublishedForm
from palestra.runs.reader import RunReader
from palestra.util.hugging_face import is_hub_id
from palestra.util.json_types import JsonObject

PICTURE = "training.png"
METHODS = {
    "grpo": "reinforcement learning (GRPO)",
    "sft": "supervised fine-tuning",
    "dpo": "direct preference optimisation (DPO)",
    "distill": "on-policy distillation",
}
CURVES = ("reward/mean", "loss/mean")
EVALUATIONS = (
    "eval/success",
    "eval/success_stderr",
    "eval/reward_mean",
    "eval/pass_at_4",
    "eval/pass_at_8",
    "eval/loss",
)
SETTINGS = ("kind", "steps", "seed", "batch_size", "beta", "max_sequence_length", "train_on", "optimizer", "rollout")
MORE_SETTINGS = ("data", "penalty", "algorithm", "asynchronous", "eval", "early_stop")
ADAPTER = ("rank", "train_unembed", "weights")
POINTS = 12
"""Number of steps in the table of a curve."""


def write_card(
    run: RunReader, saved: SavedCheckpoint, form: PublishedForm, *, repository: str, base_name: str, has_picture: bool
) -> str:
    """The text of README.md in the repository."""
    about = run.read_about()
    config: JsonObject = about["config"]
    card = _card_settings(config)
    metrics = run.read_metrics()
    parts = [
        _front_matter(config, card, form, base_name),
        f"# {repository.rpartition('/')[2]}",
        card.description or "",
        _opening(config, saved, form, base_name),
        "## Use",
        _usage(form, repository, base_name, for_vllm=not config.get("model", {}).get("train_unembed")),
        "## Data",
        _data(config, card),
        "## Results",
        *_results(metrics, saved.step, has_picture=has_picture),
        "## Settings",
        _settings(config),
        _versions(about),
    ]
    return redact("\n\n".join(part for part in parts if part) + "\n")


def _card_settings(config: JsonObject) -> CardConfig:
    try:
        return CardConfig.model_validate(config.get("card", {}))
    except ValidationError:
        return CardConfig()  # a newer version wrote it


def _front_matter(config: JsonObject, card: CardConfig, form: PublishedForm, base_name: str) -> str:
    front: JsonObject = {
        "library_name": "peft" if form == "peft" else "transformers",
        "pipeline_tag": "text-generation",
    }
    if is_hub_id(base_name):
        front |= {"base_model": base_name, "base_model_relation": "adapter" if form == "peft" else "finetune"}
    if card.license:
        front["license"] = card.license
    if datasets := [source.name for source in card.data if is_hub_id(source.name)]:
        front["datasets"] = datasets
    front["tags"] = ["palestra", "lora", config.get("kind", "grpo")]
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---"


def _opening(config: JsonObject, saved: SavedCheckpoint, form: PublishedForm, base_name: str) -> str:
    what = f"A LoRA adapter for `{base_name}`" if form == "peft" else f"`{base_name}` with a LoRA adapter folded in"
    how = METHODS.get(config.get("kind", "grpo"), config.get("kind"))
    return (
        f"{what}, trained by {how} with Palestra {__version__}. "
        f"These are the weights after step {saved.step} of {config.get('steps')} of the run `{saved.run.name}`."
    )


def _usage(form: PublishedForm, repository: str, base_name: str, *, for_vllm: bool) -> str:
    """`for_vllm`: vLLM takes the adapter, which it does not if the unembedding was trained."""
    if form == "merged":
        code = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{repository}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{repository}")'
        )
        return f"```python\n{code}\n```\n\nWith vLLM: `vllm serve {repository}`."
    code = (
        "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{base_name}")\n'
        f'model = PeftModel.from_pretrained(base, "{repository}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{base_name}")'
    )
    serve = f"vllm serve {base_name} --enable-lora --lora-modules policy={repository}"
    return f"```python\n{code}\n```" + (f"\n\nWith vLLM: `{serve}`." if for_vllm else "")


def _data(config: JsonObject, card: CardConfig) -> str:
    lines = [_trained_on(config)]
    if card.data:
        rows = [[source.name, source.license or "not named", source.url or ""] for source in card.data]
        lines.append(_table(["data", "licence", "where"], rows))
    else:
        lines.append("The run's config names no data sources and no licences (`card.data`).")
    return "\n\n".join(lines)


def _trained_on(config: JsonObject) -> str:
    if environments := config.get("environments"):
        names = [_with_file(entry["name"], entry.get("tasks")) for entry in environments]
        return f"Tasks of the environments {', '.join(names)}."
    return f"Rows of `{Path(str(config.get('data', 'a file'))).name}`."


def _with_file(name: str, tasks: str | None) -> str:
    return f"`{name}` (`{Path(tasks).name}`)" if tasks else f"`{name}`"


def _results(metrics: Sequence[JsonObject], step: int, *, has_picture: bool) -> Iterable[str]:
    evaluated = [row for row in metrics if any(row.get(name) is not None for name in EVALUATIONS)]
    if evaluated:
        names = [name for name in EVALUATIONS if any(row.get(name) is not None for row in evaluated)]
        yield "Evaluations on held-out data; the published step is in bold."
        yield _metric_table(evaluated, names, step)
    curve = next((name for name in CURVES if any(row.get(name) is not None for row in metrics)), None)
    if curve is not None:
        rows = [row for row in metrics if row.get(curve) is not None]
        yield f"`{curve}` of the training steps:"
        yield _metric_table(_thinned(rows, step), [curve], step)
    if has_picture:
        yield f"![Curves of the run]({PICTURE})"
    if not evaluated and curve is None:
        yield "The run has no metrics."


def _thinned(rows: Sequence[JsonObject], step: int) -> list[JsonObject]:
    """Returns some rows: the first, the last, that of the published step, and others between them at equal
    distances."""
    last = len(rows) - 1
    kept = {round(last * point / (POINTS - 1)) for point in range(POINTS)} if last else {0}
    return [row for place, row in enumerate(rows) if place in kept or row["step"] == step]


def _metric_table(rows: Sequence[JsonObject], names: Sequence[str], step: int) -> str:
    lines = [
        [f"**{row['step']}**" if row["step"] == step else str(row["step"]), *(_number(row.get(name)) for name in names)]
        for row in rows
    ]
    return _table(["step", *(f"`{name}`" for name in names)], lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _settings(config: JsonObject) -> str:
    chosen = {name: config[name] for name in (*SETTINGS, *MORE_SETTINGS) if config.get(name) is not None}
    if not isinstance(chosen.get("data"), dict):
        chosen.pop("data", None)  # the path of a file
    model = config.get("model", {})
    chosen["adapter"] = {name: model[name] for name in ADAPTER if model.get(name) is not None}
    return f"```yaml\n{yaml.safe_dump(chosen, sort_keys=False)}```"


def _versions(about: JsonObject) -> str:
    packages = about.get("facts", {}).get("packages", {})
    known = [f"{name} {packages[name]}" for name in ("palestra", "tinker", "torch") if name in packages]
    return f"Trained with {', '.join(known)}." if known else ""
