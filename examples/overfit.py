"""Palestra in a minute: a small model, a LoRA adapter, one sentence learned by heart.

Runs on a CPU with nothing to download: the model is made on the spot, random weights and a real tokenizer.
What you see: it babbles, it learns, it says the sentence; then training is undone by simply not using the adapter.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from palestra.model import AdapterPool, Sampler, Trainer, TrainItem, encode, load_model
from palestra.model.loading.parameter_counts import count_parameters
from palestra.testing.random_model import make_random_model
from palestra.types import AdamParams, Datum, LoraConfig, SampleRequest, SamplingParams

PROMPT = "The palestra was"
SENTENCE = " a wrestling school: small, open to all, and known for teaching by practice rather than by talk."


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", type=Path, help="a Hugging Face folder; without it a random one is made")
    options.add_argument("--steps", type=int, default=80)
    args = options.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or make_random_model(Path(scratch) / "model", shape="tiny", seed=7)
        run(folder, args.steps, console)


def run(folder: Path, steps: int, console: Console) -> None:
    model = load_model(folder)
    pool = AdapterPool(model.spec, dtype=model.decoder.dtype, device=model.decoder.device)
    sampler = Sampler(model.decoder, pool, tokenizer=model.tokenizer)
    trainer = Trainer(model.decoder, pool)
    adapter = pool.create(LoraConfig(rank=8, seed=0))

    prompt = model.tokenizer.encode(PROMPT, add_special_tokens=False).ids
    sentence = model.tokenizer.encode(SENTENCE, add_special_tokens=False).ids + list(model.spec.eos_token_ids[:1])
    request = SampleRequest(
        prompt=tuple(prompt), params=SamplingParams(temperature=0, max_tokens=len(sentence), seed=0)
    )

    def say(label: str, who=None) -> str:
        tokens = sampler.generate([request], who)[0].sequences[0].tokens
        text = model.tokenizer.decode(tokens)
        console.print(f"[bold]{label:<9}[/] {PROMPT}", end="")
        console.print(text, style="cyan", markup=False, highlight=False)
        return text

    console.print(
        f"[dim]{model.spec.architecture}, {count_parameters(model.spec) / 1e6:.1f}M parameters, random weights[/]"
    )
    say("before")

    tokens = prompt + sentence
    weights = np.array([0.0] * (len(prompt) - 1) + [1.0] * len(sentence), np.float32)
    datum = Datum.of_tokens(tokens[:-1], target_tokens=encode(np.array(tokens[1:])), weights=encode(weights))
    columns = (
        TextColumn("[bold]learning "),
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}"),
        TextColumn("loss per token {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=steps, loss=float("nan"))
        for _ in range(steps):
            (result,) = trainer.forward_backward([TrainItem(adapter, datum)])
            trainer.optim_step({adapter: AdamParams(learning_rate=2e-3)})
            progress.update(bar, advance=1, loss=result.loss / len(sentence))

    learned = say("after", adapter)
    say("base", None)
    if learned.strip() == SENTENCE.strip():
        console.print("[green]learned word for word;[/] the base model is as it was")
    else:
        console.print(f"[yellow]not yet word for word:[/] try more steps, for example --steps {steps * 2}")


if __name__ == "__main__":
    main()
