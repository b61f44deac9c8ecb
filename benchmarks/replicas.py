"""What a replica is worth: training and sampling at once, new weights on their way, and the same samples.

    palestra serve --model MODEL models.0.replicas=1 --port 8000
    palestra serve --model MODEL --port 8001 --state other
    python benchmarks/replicas.py --server http://127.0.0.1:8000 --peer-url http://127.0.0.1:8001

The second server has no replica: its worker trains and samples in turns. Both may share one GPU (set `cache_tokens`);
the one that is not measured is idle. With both at hand, the same model is trained at both, and what they sample with
the same seeds is compared, to the bit.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from harness import Measure, Progress, Report, Row, alternate, argument_parser, machine, positive, report, versions

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from tinker import types

KEY = "tml-benchmark"
VOCABULARY = range(20, 480)
PROMPT = 64
ADAM = types.AdamParams(learning_rate=1e-3)
COMPARED_STEPS = 3
COMPARED_PROMPTS = 16
SAMPLES_A_PROMPT = 4


class TimedModel:
    """A model in training at one server, whose weights are sampled."""

    def __init__(self, url: str, rank: int, *, rows: int = 1, length: int = 16):
        self._service = tinker.ServiceClient(base_url=url, api_key=KEY)
        base = self._service.get_server_capabilities().supported_models[0].model_name
        assert base is not None
        self._training = self._service.create_lora_training_client(
            base_model=base, rank=rank, seed=0, train_unembed=False
        )
        tokens = random.Random(0)
        self._data = [datum(tokens.choices(VOCABULARY, k=length)) for _ in range(rows)]
        self._prompts = [
            types.ModelInput.from_ints(tokens.choices(VOCABULARY, k=PROMPT)) for _ in range(COMPARED_PROMPTS)
        ]

    def step(self) -> Callable[[], int]:
        """Asks for a training step; what it returns waits for it, and says how many tokens were trained on."""
        passed = self._training.forward_backward(self._data, "cross_entropy")
        stepped = self._training.optim_step(ADAM)

        def wait() -> int:
            passed.result()
            stepped.result()
            return sum(one.model_input.length for one in self._data)

        return wait

    def draws(self, sampler: tinker.SamplingClient, tokens: int) -> Callable[[], int]:
        asked = [
            sampler.sample(prompt, SAMPLES_A_PROMPT, types.SamplingParams(max_tokens=tokens, temperature=1.0))
            for prompt in self._prompts
        ]
        return lambda: sum(len(one.tokens) for answer in asked for one in answer.result().sequences)

    def weights_s(self) -> float:
        """Seconds from the end of a step to the first token drawn from its weights."""
        self.step()()
        start = time.perf_counter()
        sampler = self.sampler()
        sampler.sample(self._prompts[0], 1, types.SamplingParams(max_tokens=1)).result()
        return time.perf_counter() - start

    def seeded(self, tokens: int) -> list[types.SampledSequence]:
        sampler = self.sampler()
        asked = [
            sampler.sample(
                prompt, SAMPLES_A_PROMPT, types.SamplingParams(max_tokens=tokens, temperature=1.0, seed=number)
            )
            for number, prompt in enumerate(self._prompts)
        ]
        return [one for answer in asked for one in answer.result().sequences]

    def sampler(self) -> tinker.SamplingClient:
        return self._training.save_weights_and_get_sampling_client()

    def close(self) -> None:
        self._service.close("success").result()


def datum(tokens: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},  # type: ignore[dict-item]
    )


def rate(ask: Callable[[], Callable[[], int]], seconds: float) -> float:
    """Tokens a second, with two requests under way."""
    start = time.perf_counter()
    waiting, done, ended = deque([ask(), ask()]), 0, start
    while waiting:
        done += waiting.popleft()()
        ended = time.perf_counter()
        if ended - start < seconds:
            waiting.append(ask())
    return done / (ended - start)


class Rates:
    """Training and sampling at one server: alone, and at once."""

    def __init__(self, url: str, *, seconds: float, tokens: int, rows: int, length: int):
        self._model = TimedModel(url, 32, rows=rows, length=length)
        self._sampler, self._seconds, self._tokens = self._model.sampler(), seconds, tokens
        self.sampled_meanwhile: list[float] = []

    def training(self) -> float:
        return rate(self._model.step, self._seconds)

    def sampling(self) -> float:
        return rate(lambda: self._model.draws(self._sampler, self._tokens), self._seconds)

    def training_while_sampling(self) -> float:
        with ThreadPoolExecutor(1) as beside:
            sampling = beside.submit(self.sampling)
            trained = self.training()
            self.sampled_meanwhile.append(sampling.result())
        return trained

    def close(self) -> None:
        self._model.close()


def compare(servers: dict[str, str], tokens: int) -> list[str]:
    """The same training at both servers, then the same seeds, once in peace and once while both train on."""
    models = {name: TimedModel(url, 32, rows=4, length=64) for name, url in servers.items()}
    busy = {name: TimedModel(url, 8, rows=4, length=256) for name, url in servers.items()}
    for model in models.values():
        for _ in range(COMPARED_STEPS):
            model.step()()
    lines = []
    for what in ("", ", other models being trained meanwhile"):
        ended = threading.Event()
        others = [threading.Thread(target=train_until, args=(one, ended)) for one in busy.values() if what]
        for other in others:
            other.start()
        try:
            ours, peers = (model.seeded(tokens) for model in models.values())
        finally:
            ended.set()
            for other in others:
                other.join()
        pairs = list(zip(ours, peers, strict=True))
        same_tokens = sum(a.tokens == b.tokens for a, b in pairs)
        same_bits = sum(a.tokens == b.tokens and a.logprobs == b.logprobs for a, b in pairs)
        lines.append(
            f"after {COMPARED_STEPS} steps at both servers, the same seeds{what}: of {len(pairs)} sequences"
            f" {same_tokens} have the same tokens, {same_bits} also the same log-probabilities to the bit"
        )
    for model in (*models.values(), *busy.values()):
        model.close()
    return lines


def train_until(model: TimedModel, ended: threading.Event) -> None:
    while not ended.is_set():
        model.step()()


def main() -> None:
    parser = argument_parser("replicas", "What a replica is worth: training and sampling at once, the same samples.")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="a server with replicas")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32], help="LoRA ranks of the weights on their way")
    parser.add_argument("--seconds", type=float, default=10.0, help="of one measurement")
    parser.add_argument("--tokens", type=positive, default=256, help="sampled in one sequence")
    parser.add_argument("--rows", type=positive, default=16, help="sequences of a training step")
    parser.add_argument("--length", type=positive, default=512, help="tokens of such a sequence")
    args = parser.parse_args()
    progress = Progress()
    servers = {"ours": args.server} | ({"peer": args.peer_url} if args.peer_url else {})
    rounds = args.rounds or (1 if args.quick else 3)
    shape = {"seconds": 2.0 if args.quick else args.seconds, "tokens": args.tokens}
    rates = {name: Rates(url, **shape, rows=args.rows, length=args.length) for name, url in servers.items()}
    rows = []
    for what, one in (
        ("training alone", Rates.training),
        ("sampling alone", Rates.sampling),
        ("training, while sampling", Rates.training_while_sampling),
    ):
        contenders = {name: partial(one, rates[name]) for name in servers}
        measured = alternate(contenders, rounds, warmups=1, progress=progress)
        rows.append(Row(what, "tok/s", measured["ours"], args.peer_url, measured.get("peer")))
    meanwhile = {name: Measure(tuple(one.sampled_meanwhile[1:])) for name, one in rates.items()}
    rows.append(Row("sampling, while training", "tok/s", meanwhile["ours"], args.peer_url, meanwhile.get("peer")))
    for one in rates.values():
        one.close()
    for rank in args.ranks:
        models = {name: TimedModel(url, rank) for name, url in servers.items()}
        contenders = {name: model.weights_s for name, model in models.items()}
        measured = alternate(contenders, args.rounds or 5, warmups=1, progress=progress)
        peer: Measure | None = measured.get("peer")
        what = f"weights of rank {rank}, to the first token"
        rows.append(Row(what, "s", measured["ours"], args.peer_url, peer, less_is_better=True))
        for model in models.values():
            model.close()
    notes = compare(servers, args.tokens) if args.peer_url else []
    progress.done()
    report(Report("replicas", machine(), versions(["tinker"]), rows, notes), json_line=args.json)


if __name__ == "__main__":
    main()
