"""Routing replay: how far the trainer's log-probabilities are from the sampler's, with and without it, and its cost.

    python benchmarks/routing_replay.py --quick
    python benchmarks/routing_replay.py --shape qwen3-30b-a3b --device cuda

The model is random. In bfloat16 sampler and trainer round differently on a CPU (on a GPU with `numerics: exact` they do
not), and now and then a token goes to other experts. Sampled are answers to random prompts, at temperature 1; compared
are their tokens.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
from harness import Measure, Progress, Report, Row, argument_parser, machine, report, versions

from palestra.model import AdapterPool, Sampler, Trainer, TrainItem, encode, load_model
from palestra.model.training.trainer import DatumResult
from palestra.testing.random_model import SHAPES, make_random_model
from palestra.types import Datum, LoraConfig, SampledSequence, SampleRequest, SamplingParams


def requests_of(vocabulary: int, count: int, prompt: int, tokens: int, *, record: bool) -> list[SampleRequest]:
    numbers = np.random.default_rng(0)
    return [
        SampleRequest(
            prompt=tuple(numbers.integers(0, vocabulary, prompt).tolist()),
            params=SamplingParams(max_tokens=tokens, seed=seed, stop_token_ids=()),
            record_routing=record,
        )
        for seed in range(count)
    ]


def datum_of(request: SampleRequest, sequence: SampledSequence, *, replay: bool) -> Datum:
    tokens = [*request.prompt, *sequence.tokens]
    datum = Datum.of_tokens(tokens[:-1], target_tokens=encode(np.array(tokens[1:])))
    return msgspec.structs.replace(datum, routing=sequence.routing) if replay else datum


def gaps(results: list[DatumResult], sequences: list[SampledSequence]) -> np.ndarray:
    pairs = zip(results, sequences, strict=True)
    return np.concatenate([np.abs(r.logprobs[-len(s.tokens) :] - np.array(s.logprobs)) for r, s in pairs])


def measure(folder: Path, device: str, dtype: str, size: tuple[int, int, int]) -> list[Row]:
    model = load_model(folder, device=device, dtype=dtype)
    pool = AdapterPool(model.spec, dtype=model.decoder.dtype, device=model.decoder.device)
    trainer, adapter = Trainer(model.decoder, pool), pool.create(LoraConfig(rank=8, seed=0))
    count, prompt, tokens = size
    sampled: dict[bool, tuple[float, list[SampledSequence]]] = {}
    for record in (False, False, True):  # the first warms up
        sampler = Sampler(model.decoder, pool, cache_tokens=count * (prompt + tokens + 16))
        requests = requests_of(model.spec.vocab_size, *size, record=record)
        start = time.perf_counter()
        sequences = [result.sequences[0] for result in sampler.generate(requests, adapter)]
        sampled[record] = time.perf_counter() - start, sequences
    sequences, rows, found = sampled[True][1], [], {}
    for replay in (False, False, True):
        items = [TrainItem(adapter, datum_of(r, s, replay=replay)) for r, s in zip(requests, sequences, strict=True)]
        start = time.perf_counter()
        results = trainer.forward(items)
        found[replay] = time.perf_counter() - start, gaps(results, sequences)
    for name, reduce in (("mean", np.mean), ("99 %", lambda g: np.quantile(g, 0.99)), ("max", np.max)):
        ours, plain = (Measure((float(reduce(found[replay][1])),)) for replay in (True, False))
        rows.append(
            Row(f"mismatch of a log-probability, {name}", "nats", ours, "no replay", plain, less_is_better=True)
        )
    recorded = sum(len(s.routing.data) for s in sequences if s.routing is not None)
    n_positions = sum(s.routing.shape[0] for s in sequences if s.routing is not None)
    for name, ours, plain in (
        ("sampling", sampled[True][0], sampled[False][0]),
        ("the trainer's forward pass", found[True][0], found[False][0]),
    ):
        rows.append(Row(name, "s", Measure((ours,)), "no replay", Measure((plain,)), less_is_better=True))
    return [*rows, Row("ids for a token", "bytes", Measure((recorded / n_positions,)), less_is_better=True)]


def main() -> None:
    parser = argument_parser("routing_replay", __doc__ or "")
    parser.add_argument("--shape", default="micro", choices=list(SHAPES), help="bfloat16 is slow on many CPUs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    size = (8, 32, 32) if args.quick else (32, 64, 128)
    with tempfile.TemporaryDirectory() as temporary:
        Progress().say(f"random {args.shape}")
        folder = make_random_model(Path(temporary) / "model", family="qwen3_moe", shape=args.shape, dtype=args.dtype)
        rows = measure(folder, args.device, args.dtype, size)
    report(Report("routing_replay", machine(), versions(["palestra", "torch"]), rows), json_line=args.json)


if __name__ == "__main__":
    main()
