"""How long new weights take to the samplers: from the end of a training step to the first token drawn from them, at a
server with replicas, and at a second one to compare with, say one without.

    palestra serve --model MODEL models.0.replicas=2 --port 8000
    palestra serve --model MODEL --port 8001 --state other
    python benchmarks/replica_weights.py --server http://127.0.0.1:8000 --peer-url http://127.0.0.1:8001

Owns: the steps, the times. Never touches: servers; any that speaks Tinker's API will do.
"""

from __future__ import annotations

import os
import time

from harness import Measure, Report, Row, alternate, argument_parser, machine, report, versions

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from tinker import types

KEY = "tml-benchmark"
TOKENS = list(range(20, 36))


class TimedModel:
    """A model in training, whose weights are sampled after each step."""

    def __init__(self, url: str, rank: int):
        self._service = tinker.ServiceClient(base_url=url, api_key=KEY)
        base = self._service.get_server_capabilities().supported_models[0].model_name
        assert base is not None
        self._training = self._service.create_lora_training_client(
            base_model=base, rank=rank, seed=0, train_unembed=False
        )

    def seconds(self) -> float:
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(TOKENS[:-1]),
            loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},  # type: ignore[dict-item]
        )
        passed = self._training.forward_backward([datum], "cross_entropy")
        self._training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        passed.result()
        start = time.perf_counter()
        sampler = self._training.save_weights_and_get_sampling_client()
        prompt = types.ModelInput.from_ints(TOKENS)
        sampler.sample(prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=1)).result()
        return time.perf_counter() - start

    def close(self) -> None:
        self._service.close("success").result()


def main() -> None:
    parser = argument_parser("replica_weights", "How long new weights take to the samplers.")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="a server with replicas")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32], help="LoRA ranks")
    args = parser.parse_args()
    rows = []
    for rank in args.ranks:
        models = {"ours": TimedModel(args.server, rank)}
        if args.peer_url:
            models["peer"] = TimedModel(args.peer_url, rank)
        measured = alternate({name: model.seconds for name, model in models.items()}, args.rounds or 5, warmups=1)
        peer: Measure | None = measured.get("peer")
        what = f"weights of rank {rank}, to the first token"
        rows.append(Row(what, "s", measured["ours"], args.peer_url, peer, less_is_better=True))
        for model in models.values():
            model.close()
    report(Report("replica_weights", machine(), versions(["tinker"]), rows), json_line=args.json)


if __name__ == "__main__":
    main()
