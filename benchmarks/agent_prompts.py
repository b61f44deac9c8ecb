"""What an agent's long system prompt costs: time to the first token of an episode, when the prompt was computed for an
earlier episode on the same weights, beside the same when it cannot be shared.

    python benchmarks/agent_prompts.py
    python benchmarks/agent_prompts.py --quick --json
    python benchmarks/agent_prompts.py --model FOLDER --device cuda
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tinker
from harness import Measure, Progress, Report, Row, argument_parser, machine, positive, report, versions
from peers.tinker_server import our_server
from tinker import types

VOCABULARY = 500
"""Ids from here on begin prompts that share nothing."""
TASK_TOKENS = 200
"""What differs from episode to episode, after the system prompt."""
VERSIONS, LATER = 3, 4


class Episodes:
    """First calls of episodes of one agent, each with a task of its own."""

    def __init__(self, trainer: tinker.TrainingClient, system_tokens: int) -> None:
        self._numbers = random.Random(0)
        self._trainer, self._others = trainer, 0
        self._system = self._some(system_tokens)
        self._sampler = trainer.save_weights_and_get_sampling_client()

    def update(self) -> None:
        """Changes the weights."""
        tokens = self._some(16)
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 15}
        datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        self._trainer.forward_backward([datum], "cross_entropy").result()
        self._trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        self._sampler = self._trainer.save_weights_and_get_sampling_client()

    def first_token_s(self, *, is_shared: bool = True) -> float:
        """A prompt whose first token is another shares nothing."""
        self._others += not is_shared
        system = self._system if is_shared else [VOCABULARY + self._others, *self._system[1:]]
        prompt = types.ModelInput.from_ints([*system, *self._some(TASK_TOKENS)])
        begin = time.perf_counter()
        self._sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
        return time.perf_counter() - begin

    def _some(self, count: int) -> list[int]:
        return [self._numbers.randrange(3, VOCABULARY) for _ in range(count)]


def parse() -> argparse.Namespace:
    parser = argument_parser("agent_prompts", "What an agent's long system prompt costs, shared and not.")
    parser.add_argument("--tokens", type=positive, default=30_000, help="of the system prompt")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="the model  [a random one of 4 layers]")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def main() -> None:
    args, progress = parse(), Progress()
    tokens = 3000 if args.quick else args.tokens
    command = Path(sys.executable).with_name("palestra")
    with tempfile.TemporaryDirectory(prefix="palestra-bench-") as scratch:
        model = args.model or Path(scratch) / "model"
        if args.model is None:
            made = [str(command), "model", "random", str(model), "--context", str(tokens + 1024)]
            subprocess.run(made, check=True, capture_output=True)
        with our_server(command, model, Path(scratch) / "state", "--name", "model", "--device", args.device) as server:
            service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
            rows = measure(Episodes(service.create_lora_training_client("model", rank=8), tokens), tokens, progress)
    report(Report("agent_prompts", machine(), versions(("palestra", "torch")), rows), json_line=args.json)


def measure(episodes: Episodes, tokens: int, progress: Progress) -> list[Row]:
    first, later, alone = [], [], []
    for version in range(VERSIONS):
        progress.doing(f"weights {version + 1} of {VERSIONS}")
        first.append(episodes.first_token_s())
        later += [episodes.first_token_s() for _ in range(LATER)]
        alone.append(episodes.first_token_s(is_shared=False))
        episodes.update()
    not_shared = Measure(tuple(alone))
    return [
        Row(
            f"{tokens} tokens, first episode on new weights",
            "s",
            Measure(tuple(first)),
            "not shared",
            not_shared,
            less_is_better=True,
        ),
        Row(
            f"{tokens} tokens, later episodes",
            "s",
            Measure(tuple(later)),
            "not shared",
            not_shared,
            less_is_better=True,
        ),
    ]


if __name__ == "__main__":
    main()
