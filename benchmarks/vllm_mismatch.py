"""How far the logprobs of sampled tokens are from those the trainer gives the same tokens: at a server whose model is
sampled by vLLM, and at a second one to compare with.

    make vllm                                                  # once: vLLM in .venv-vllm
    palestra serve --model ephebe models.0.sampler=vllm models.0.vllm.python=.venv-vllm/bin/python
    python benchmarks/vllm_mismatch.py --server http://127.0.0.1:8000 [--peer-url URL]
"""

from __future__ import annotations

import math
import os
import random
import statistics
from collections.abc import Iterator

from harness import Measure, Report, Row, argument_parser, machine, report, versions

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from tinker import types

KEY = "tml-benchmark"
RANK = 8
PROMPT, ANSWER = 32, 64
TOKENS = range(16, 500)
STEPS, LEARNING_RATE = 8, 2e-3
FIGURES = {
    "mean distance": lambda deltas: statistics.fmean(map(abs, deltas)),
    "largest distance": lambda deltas: max(map(abs, deltas)),
    # Of trainer and sampler, by Schulman's estimator k3.
    "KL (k3)": lambda deltas: statistics.fmean(math.expm1(d) - d for d in deltas),
}


def mismatches(url: str, model: str | None, prompts: int) -> dict[str, list[float]]:
    """Trainer less sampler, token by token: for the base model and for an adapter that was trained a little."""
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    base = model or service.get_server_capabilities().supported_models[0].model_name
    assert base is not None
    # An adapter is the base model until its first step.
    training = service.create_lora_training_client(base_model=base, rank=RANK, seed=0, train_unembed=False)
    numbers = random.Random(0)
    found = {"base": list(_deltas(service.create_sampling_client(base_model=base), training, numbers, prompts))}
    for _ in range(STEPS):
        data = [_datum(_some(numbers, PROMPT + ANSWER)) for _ in range(4)]
        passed = training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)).result()
        passed.result()
    sampler = training.save_weights_and_get_sampling_client()
    found["adapter"] = list(_deltas(sampler, training, numbers, prompts))
    service.close("success").result()
    return found


def _deltas(
    sampler: tinker.SamplingClient, training: tinker.TrainingClient, numbers: random.Random, prompts: int
) -> Iterator[float]:
    wanted = types.SamplingParams(max_tokens=ANSWER, temperature=1.0, stop=[])
    asked = [_some(numbers, PROMPT) for _ in range(prompts)]
    futures = [sampler.sample(types.ModelInput.from_ints(p), num_samples=1, sampling_params=wanted) for p in asked]
    drawn = [future.result().sequences[0] for future in futures]
    data = [_datum([*prompt, *one.tokens]) for prompt, one in zip(asked, drawn, strict=True)]
    outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
    for one, output in zip(drawn, outputs, strict=True):
        assert one.logprobs is not None
        own = list(output["logprobs"].data)[-len(one.tokens) :]
        yield from (trained - sampled for trained, sampled in zip(own, one.logprobs, strict=True))


def _some(numbers: random.Random, count: int) -> list[int]:
    return numbers.choices(TOKENS, k=count)


def _datum(tokens: list[int]) -> types.Datum:
    n = len(tokens) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[n]),
            "weights": types.TensorData(data=[1.0] * n, dtype="float32", shape=[n]),
        },
    )


def main() -> None:
    parser = argument_parser("vllm_mismatch", "Logprobs of sampled tokens beside the trainer's own.")
    parser.add_argument("--server", required=True, help="a server whose model is sampled by vLLM")
    parser.add_argument("--model", help="which of its models; default: the first")
    args = parser.parse_args()
    prompts = 8 if args.quick else 64
    ours = mismatches(args.server, args.model, prompts)
    peer = mismatches(args.peer_url, args.model, prompts) if args.peer_url else {}
    rows = [
        Row(
            f"{weights}: {what}, {len(deltas)} tokens",
            "nats",
            Measure((compute(deltas),)),
            args.peer_url,
            Measure((compute(peer[weights]),)) if peer else None,
            less_is_better=True,
        )
        for weights, deltas in ours.items()
        for what, compute in FIGURES.items()
    ]
    report(Report("vllm_mismatch", machine(), versions(["palestra", "tinker"]), rows), json_line=args.json)


if __name__ == "__main__":
    main()
