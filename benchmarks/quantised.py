"""What weights in 8 or 4 bits cost: the mean KL divergence from the unquantised model, memory, and time.

    python benchmarks/quantised.py --quick
    python benchmarks/quantised.py --shape qwen3-4b --device cuda

Sequences are drawn from the unquantised model.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import torch
from harness import Measure, Progress, Report, Row, argument_parser, machine, report, versions
from torch import Tensor

from palestra.config.bundled import EPHEBE, bundled_model
from palestra.model import AdapterPool, Model, Sampler, load_model
from palestra.model.attention.backends import packed_attention
from palestra.model.lora.linear import LoraPlan
from palestra.model.mixers.packed_recurrence import packed_recurrence
from palestra.model.quantised.forms import FORM_NAMES
from palestra.model.quantised.packed import PackedWeight
from palestra.model.training.head import logits_of
from palestra.testing.random_model import SHAPES, make_random_model
from palestra.types import SampleRequest, SamplingParams

PROMPT = 8
CHUNK = 64  # rows whose whole distributions are held at once


def draw_sequences(model: Model, count: int, length: int) -> list[list[int]]:
    """What the unquantised model says behind a few random tokens."""
    pool = AdapterPool(model.spec, dtype=model.decoder.dtype, device=model.decoder.device)
    sampler = Sampler(model.decoder, pool, cache_tokens=count * (length + 64))
    numbers = torch.Generator().manual_seed(0)
    for seed in range(count):
        prompt = torch.randint(0, model.spec.vocab_size, (PROMPT,), generator=numbers).tolist()
        params = SamplingParams(max_tokens=length - PROMPT, seed=seed, stop_token_ids=())
        sampler.submit(SampleRequest(prompt=tuple(prompt), num_samples=1, params=params), None)
    found: list[list[int]] = []
    while sampler.has_work:
        found += [list(done.result.sequences[0].tokens) for done in sampler.step().finished]
    return found


def hidden_states(model: Model, sequences: list[list[int]]) -> Tensor:
    decoder, lengths = model.decoder, [len(s) for s in sequences]
    device = decoder.device
    attend = packed_attention(lengths, model.spec, device, decoder.dtype)
    recur = packed_recurrence(lengths, model.spec, device, decoder.dtype)
    tokens = torch.tensor([t for s in sequences for t in s], device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    with torch.no_grad():
        return decoder(tokens, positions, attend, LoraPlan(), recur)


def mean_kl(model: Model, hidden: Tensor, reference: Tensor) -> float:
    """Over all positions; the unembedding is the same for both."""
    total = 0.0
    for ours, theirs in zip(hidden.split(CHUNK), reference.split(CHUNK), strict=True):
        q, p = (logits_of(model.decoder, h, LoraPlan()).float().log_softmax(-1) for h in (ours, theirs))
        total += float((p.exp() * (p - q)).sum())
    return total / len(hidden)


def product_bytes(weights: object) -> int:
    return sum(w.nbytes for w in _weights(weights))


def _weights(value: object) -> Iterator[Tensor | PackedWeight]:
    if isinstance(value, Tensor | PackedWeight):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _weights(item)
    elif is_dataclass(value):
        for one in fields(value):
            yield from _weights(getattr(value, one.name))


def rows_of(what: str, folder: Path, device: str, dtype: str | None, size: tuple[int, int]) -> list[Row]:
    plain = load_model(folder, device=device, dtype=dtype)
    sequences = draw_sequences(plain, *size)
    reference, plain_s = _timed(plain, sequences)
    plain_bytes = product_bytes(plain.decoder.weights.layers)
    del plain
    rows = []
    for name in FORM_NAMES:
        model = load_model(folder, device=device, dtype=dtype, weights=name)
        hidden, seconds = _timed(model, sequences)
        kl = mean_kl(model, hidden, reference)
        memory = product_bytes(model.decoder.weights.layers)
        rows += [
            Row(f"{what} {name}: mean KL", "nats", Measure((kl,)), less_is_better=True),
            Row(
                *(f"{what} {name}: layers", "MB", Measure((memory / 1e6,)), "unquantised"),
                Measure((plain_bytes / 1e6,)),
                less_is_better=True,
            ),
            Row(
                *(f"{what} {name}: forward", "ms", Measure((seconds * 1e3,)), "unquantised"),
                Measure((plain_s * 1e3,)),
                less_is_better=True,
            ),
        ]
    return rows


def _timed(model: Model, sequences: list[list[int]]) -> tuple[Tensor, float]:
    hidden_states(model, sequences)
    start = time.perf_counter()
    hidden = hidden_states(model, sequences)
    if hidden.is_cuda:
        torch.cuda.synchronize()
    return hidden, time.perf_counter() - start


def main() -> None:
    parser = argument_parser("quantised", __doc__ or "")
    parser.add_argument("--shape", default="small", choices=list(SHAPES), help="the random model's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="of the models; bfloat16 on a GPU unless said otherwise")
    args = parser.parse_args()
    dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else None)
    size = (4, 64) if args.quick else (32, 128)
    ephebe = bundled_model(EPHEBE)
    assert ephebe is not None
    progress = Progress()
    with tempfile.TemporaryDirectory() as temporary:
        progress.say("ephebe")
        rows = rows_of("ephebe", ephebe, args.device, dtype, size)
        progress.say(f"random {args.shape}")
        stored = "bfloat16" if dtype == "bfloat16" else "float32"
        folder = make_random_model(Path(temporary) / "model", shape=args.shape, dtype=stored, shards=4)
        rows += rows_of(f"random {args.shape}", folder, args.device, dtype, size)
    report(Report("quantised", machine(), versions(["palestra", "torch"]), rows), json_line=args.json)


if __name__ == "__main__":
    main()
