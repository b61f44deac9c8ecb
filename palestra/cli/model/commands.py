"""`palestra model`: make random models and puppets, fetch models, inspect model folders."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import rich_click as click

from palestra.cli.options import renamed_option
from palestra.cli.output import USAGE, count_text, fail, needs_extra, one_line_errors, print_json
from palestra.util.amounts import bytes_text, parse_amount
from palestra.util.atomic_files import naming

if TYPE_CHECKING:
    from palestra.memory_plan.model_plan import MemoryPlan
    from palestra.model.loading.model_facts import ExpertFacts

PLANNED_CONTEXT = 4096

overwrite_option = renamed_option(
    "--overwrite", old="--force", is_flag=True, help="Write into a folder that is not empty."
)


@click.group()
def model() -> None:
    """Make random models, fetch models, inspect model folders."""


@model.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--family",
    default="qwen3",
    show_default=True,
    help="qwen3, qwen3_moe, qwen3_5, qwen3_5_moe, qwen3_next, gpt_oss, qwen2, llama, mistral, ministral3, phi3, olmo2, "
    "olmo3, smollm3, granite, seed_oss, gemma3, gemma4, gemma4_moe, glm4_moe, glm4_moe_lite, deepseek_v3 or "
    "nemotron_h; with a vision tower: qwen3_vl, qwen3_vl_moe, qwen3_5_vl, qwen3_5_moe_vl, gemma4_vl or gemma4_moe_vl.",
)
@click.option(
    "--shape",
    default="tiny",
    show_default=True,
    help="micro, tiny, small, qwen3-0.6b, qwen3-4b, qwen3-8b, qwen3-30b-a3b, qwen3.5-4b, qwen3.5-9b, "
    "qwen3.5-35b-a3b or gpt-oss-20b.",
)
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same weights.")
@click.option("--dtype", default="float32", show_default=True, help="float32, bfloat16 or float16.")
@click.option("--context", type=int, metavar="N", help="Tokens of the longest sequence. [as the shape has it]")
@click.option("--shards", default=1, show_default=True, help="Number of safetensors files.")
@overwrite_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def random(
    folder: Path,
    family: str,
    shape: str,
    seed: int,
    dtype: str,
    context: int | None,
    shards: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a random model with a real tokenizer and chat template to DIR."""
    _refuse_full_folder(folder, overwrite)
    with needs_extra("engine"):
        from palestra.testing.random_model import make_random_model
    with one_line_errors(ValueError, OSError), naming(folder):
        make_random_model(folder, family=family, shape=shape, seed=seed, dtype=dtype, context=context, shards=shards)
    size = _size_of(folder)
    if as_json:
        print_json({"folder": str(folder), "family": family, "shape": shape, "seed": seed, "size_bytes": size})
    else:
        click.echo(f"{folder}: a random {family} model of shape {shape}, {bytes_text(size)}")
        click.echo(f"look inside: palestra model info {folder}")


@model.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.argument("script", metavar="SCRIPT", type=click.File(encoding="utf-8"))
@click.option("--context", default=131072, show_default=True, metavar="N", help="Tokens of the longest sequence.")
@overwrite_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def puppet(folder: Path, script: TextIO, context: int, overwrite: bool, as_json: bool) -> None:
    """Write a model to DIR that says what SCRIPT tells it to, for tests of agents and tools.

    SCRIPT is a JSON list such as [{"when": "make a file", "say": "I make it."}]; - reads it from standard input. When a
    text of `when` occurs in the conversation, the model answers `say`, tool calls included; of several, the last one in
    the list counts. An entry without `when` is the answer to everything else.
    """
    _refuse_full_folder(folder, overwrite)
    with needs_extra("engine"):
        from palestra.testing.puppet import make_puppet, read_script
    with one_line_errors(ValueError, OSError), naming(folder):
        cues, otherwise = read_script(script.read())
        make_puppet(folder, cues, otherwise=otherwise, context=context)
    size = _size_of(folder)
    if as_json:
        print_json({"folder": str(folder), "cues": len(cues), "context": context, "size_bytes": size})
    else:
        click.echo(f"{folder}: a puppet with {len(cues)} cues, {bytes_text(size)}")
        click.echo(f"serve it: palestra serve --model {folder}")


def _refuse_full_folder(folder: Path, overwrite: bool) -> None:
    if not overwrite and folder.exists() and any(folder.iterdir()):
        raise fail(f"{folder} is not empty; choose another folder, or add --overwrite to write into it")


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


@model.command()
@click.argument("hub_id", metavar="ID")
@click.option("--revision", help="Branch, tag or commit. [main]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def pull(hub_id: str, revision: str | None, as_json: bool) -> None:
    """Fetch the model ID of the Hugging Face hub into the local cache; commands then take the ID as a model."""
    with needs_extra("engine"):
        from palestra.cli.model.pull import PullError
        from palestra.cli.model.pull import pull as fetch
    with one_line_errors(PullError):
        folder = fetch(hub_id, revision)
    if as_json:
        print_json({"id": hub_id, "folder": str(folder)})
    else:
        click.echo(f"{hub_id}: {folder}")
        click.echo(f"look inside: palestra model info {hub_id}")


@model.command()
@click.argument("folder", metavar="DIR_OR_ID", type=click.Path(path_type=Path))
@click.option("--plan", is_flag=True, help="Also plan the memory for training and sampling.")
@click.option("--memory", metavar="SIZE", help="Memory to plan for, such as 16GB. [this machine's GPU, or its memory]")
@click.option("--rows", default=8, show_default=True, help="Sequences sampled at once, for --plan.")
@click.option("--context", type=int, help="Tokens of each sequence, for --plan. [4096, or all the model reads]")
@click.option("--weights", help="Weights for --plan: bf16, fp8, int8, int4, nf4 or mxfp4. [as stored]")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def info(
    folder: Path, plan: bool, memory: str | None, rows: int, context: int | None, weights: str | None, as_json: bool
) -> None:
    """Show what a model folder, or a Hugging Face id in the local cache, holds and how much memory the model needs."""
    from palestra.util.hugging_face import find_in_cache, is_hub_id

    if is_hub_id(str(folder)):
        with one_line_errors(ValueError):
            folder = find_in_cache(str(folder))
    if not folder.is_dir():
        raise fail(f"no such folder: {folder}; to make a small one to try: palestra model random {folder}", USAGE)
    with needs_extra("engine"):
        from palestra.memory_plan.model_plan import PlanRequest, device_memory, plan_memory
        from palestra.model.errors import ModelError
        from palestra.model.loading.model_facts import LORA_RANK, gather_facts
        from palestra.model.loading.spec import ModelSpec
        from palestra.model.loading.weight_files import WeightFiles
        from palestra.model.quantised.forms import FORMS
    if weights not in (None, "bf16", *FORMS):
        raise fail(f"weights {weights!r} are not known; there are: bf16, {', '.join(FORMS)}", USAGE)
    planned = None
    with one_line_errors(ModelError, OSError, ValueError):
        facts = gather_facts(folder)
        if context is not None and context > facts.max_positions:
            raise ValueError(f"--context {context} is more than the {facts.max_positions} tokens that the model reads")
        context = context or min(PLANNED_CONTEXT, facts.max_positions)
        if plan:
            memory_bytes, kind = device_memory() if memory is None else (parse_amount(memory), "cuda")
            request = PlanRequest(memory_bytes, rows, context, weights, LORA_RANK, kind)
            with WeightFiles(folder) as files:
                planned = plan_memory(files, ModelSpec.from_folder(folder), request)
    if as_json:
        print_json(asdict(facts) | ({} if planned is None else {"plan": asdict(planned)}))
        return
    window = f", sliding window {facts.sliding_window}" if facts.sliding_window else ""
    scaling = "" if facts.rope_type == "default" else f", {facts.rope_type} scaling"
    kinds = "".join(f", {n} {kind}" for kind, n in facts.layer_kinds.items()) if len(facts.layer_kinds) > 1 else ""
    dense = f", feed-forward {facts.intermediate_size}" if facts.intermediate_size else ""
    experts = facts.experts
    active = f", {count_text(facts.active_parameters)} of them active for a token" if experts else ""
    state = bytes_text(facts.state_bytes_per_sequence)
    more = f", {state} per further sequence" if facts.state_bytes_per_sequence else ""
    lines = {
        "architecture": f"{facts.architecture} (family {facts.family})",
        "parameters": f"{count_text(facts.parameters)} in {facts.dtype}{active}",
        "layers": f"{facts.layers} of width {facts.hidden_size}{dense}{kinds}",
        "mechanisms": ", ".join(facts.mechanisms) or "none beyond Llama's",
        **({"experts": _experts_text(experts)} if experts else {}),
        "heads": f"{facts.heads} query, {facts.kv_heads} key/value, {facts.head_dim} wide",
        "context": f"{facts.max_positions} tokens{window}",
        "rope": "none" if facts.rope_type == "none" else f"theta {facts.rope_theta:g}{scaling}",
        "embeddings": f"{facts.vocab_size} rows, {'tied' if facts.tied_embeddings else 'untied'}",
        "tokenizer": f"{facts.tokenizer_vocab} tokens" if facts.tokenizer_vocab else "none",
        "end tokens": ", ".join(map(str, facts.eos_token_ids)) or "none",
        "chat template": "yes" if facts.has_chat_template else "no",
        "on disk": bytes_text(facts.size_bytes),
        "to serve": f"{bytes_text(facts.serve_bytes)} (weights, and keys and values of one full context), "
        f"{bytes_text(facts.kv_bytes_per_token)} more per further token{more}",
        f"LoRA rank {LORA_RANK}": f"{count_text(facts.lora_parameters)} parameters, {bytes_text(facts.lora_bytes)}; "
        f"{bytes_text(facts.lora_training_bytes)} while it trains",
        "LoRA trains": ", ".join(facts.lora_modules),
    }
    for name, text in lines.items():
        click.echo(f"{name:<14} {text}")
    if planned is not None:
        _print_plan(planned, rows, context)


def _print_plan(plan: MemoryPlan, rows: int, context: int) -> None:
    from palestra.memory_plan.model_plan import WAY_TEXTS

    parts = {
        "weights": plan.weights_bytes,
        "one written out": plan.scratch_bytes,
        "one adapter in training": plan.adapter_bytes,
        f"KV of {rows} x {context} tokens": plan.kv_bytes,
        f"states of {rows} sequences": plan.state_bytes,
        f"training {plan.micro_batch_tokens} tokens": plan.training_bytes,
        "runtime": plan.runtime_bytes,
    }
    click.echo("\nplan of memory")
    for name, size in parts.items():
        if size:
            click.echo(f"  {name:<28} {bytes_text(size):>10}")
    verdict = "fits into" if plan.fits else "does not fit into"
    click.echo(f"  {'together':<28} {bytes_text(plan.total_bytes):>10}, {verdict} {bytes_text(plan.memory_bytes)}")
    if plan.offloaded_bytes:
        click.echo(f"  {'beside it, in main memory':<28} {bytes_text(plan.offloaded_bytes):>10}")
    if plan.fits:
        click.echo(f"  {WAY_TEXTS[plan.checkpointing]}")
        click.echo(f"  settings: {' '.join(plan.settings)}")
    else:
        click.echo("  lower --rows or --context, or choose --weights with fewer bits")
    if plan.shared:
        click.echo(f"  or divide sequences among several such devices: {' '.join(plan.shared)}")


def _experts_text(experts: ExpertFacts) -> str:
    shared = f", beside one of {experts.shared_size} for all" if experts.shared_size else ""
    return (
        f"{experts.experts} of width {experts.size} in {experts.layers} layers, {experts.per_token} for a token{shared}"
    )
