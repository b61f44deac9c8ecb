"""`make cookbook-prefixes`: recipes of the cookbook, computed with and without sharing what their data begin with.

Runs recipes, unmodified, at a server that shares prefixes, as it does by default. The journal of the server has every
request that trained, and what came of it. The same requests are then computed again without sharing, each optimizer
step by the weights of its own steps before: in this way no sampled token differs, and losses, log-probabilities and
weights must be equal to rounding. A recipe whose data share nothing would show nothing, and fails.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from run import CookbookError, folder_of, interrupted, prepare, run_recipe, serving

from palestra.engine.backend import DatumDone
from palestra.engine.torch_trainer import TorchConfig, TorchTrainer
from palestra.model import Adapter, combine_metrics, encode
from palestra.model.training.prepared import decode
from palestra.server.core.training.request_journal import JournaledRequest, JournaledResult, Record
from palestra.store.journal.segments import find_segments, scan, segment_path
from palestra.types import Datum
from palestra.types.engine import (
    CreateModel,
    DatumOutput,
    LoadWeights,
    OptimStep,
    Pass,
    PassResult,
    Train,
    Trained,
    decode_from_worker,
    decode_to_worker,
)
from recipes import MODEL, RL, recipe

RECIPES = (
    recipe(
        "math_rl",
        "math_rl.train",
        "env=arithmetic groups_per_batch=4 group_size=4 max_tokens=16",
        steps=4,
        shows=RL,
    ),
    recipe(
        "guess_number",
        "multiplayer_rl.guess_number.train",
        "renderer_name=qwen3_disable_thinking batch_size=2 group_size=2 max_tokens=8 eval_every=0",
        steps=3,
        shows=RL,
    ),
    recipe(  # by its own settings a group is one sample, which shares nothing
        "sdft",
        "sdft.train",
        "groups_per_batch=4 group_size=4 max_tokens=16 lora_rank=8 eval_every=0",
        steps=4,
        shows="sdft/mean_teacher_entropy",
    ),
)
LOGPROB, LOSS, WEIGHTS = 1e-4, 1e-6, 1e-2
"""The largest differences: of a log-probability; of a loss, as a share of the sum of its log-probabilities; of the
weights at the end, as a share of how far they have moved: Adam divides each gradient by its size, and of one that is
nearly 0 it shows the rounding."""


@dataclass(slots=True)
class Passes:
    """What the passes of a recipe come to."""

    losses: list[float] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    """Log-probabilities of all targets, pass by pass."""
    computed: int = 0
    """Rows of the model's layers."""
    moved: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """What the weights are in the end less what they were."""

    def add(self, outputs: Sequence[DatumOutput], metrics: Mapping[str, float]) -> None:
        self.losses.append(metrics["loss:sum"])
        self.logprobs.append(np.concatenate([np.frombuffer(output.logprobs, "<f4") for output in outputs]))


def main() -> int:
    options = parse_options()
    work = Path(options.work or tempfile.mkdtemp(prefix="palestra-prefixes-")).resolve()
    done, good = set[str](), True
    try:
        prepare(work, options.python, "micro", [MODEL])
        with serving(work, [MODEL]) as url:
            for one in RECIPES:
                print(f"\n{one.name}: {one.typed}", flush=True)
                run_recipe(one, work, url, options.python)
                requests, served = trained_since(work / "state" / "journal", done)
                good &= compare(requests, served, folder_of(work, MODEL))
                done |= {request.model_id for request in requests}
    except CookbookError as error:
        print(f"\n{error}\n\nleft for you to look at: {work}", file=sys.stderr)
        return 1
    if good and not options.work:
        shutil.rmtree(work)
    return 0 if good else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has tinker-cookbook")
    parser.add_argument("--work", metavar="DIR", help="work here; else in a temporary folder")
    options = parser.parse_args()
    options.python = str(Path(options.python).absolute())
    return options


def trained_since(journal: Path, done: set[str]) -> tuple[list[Train], Passes]:
    """Returns the training requests of models that are not yet done, in order, and what the server said of them."""
    requests, outcomes = dict[tuple[str, int], Train](), dict[tuple[str, int], PassResult]()
    for record in [*records_of(journal / "requests"), *records_of(journal / "results")]:
        if isinstance(record, JournaledRequest) and record.model_id not in done:
            request = decode_to_worker(record.message)
            assert isinstance(request, Train)
            requests[record.model_id, record.seq_id] = request
        elif isinstance(record, JournaledResult):
            answer = decode_from_worker(record.frame)
            if isinstance(answer, Trained) and isinstance(answer.outcome, PassResult):
                outcomes[record.model_id, record.seq_id] = answer.outcome
    ordered, served = sorted(requests), Passes()
    for key in ordered:
        if isinstance(requests[key].operation, Pass):
            served.add(outcomes[key].outputs, outcomes[key].metrics)
    return [requests[key] for key in ordered], served


def records_of(folder: Path) -> Iterator[Record]:
    decode = msgspec.msgpack.Decoder(Record).decode
    for segment in find_segments(folder):
        for _, record in scan(segment_path(folder, segment)):
            yield decode(record)


def replay(requests: Sequence[Train], model: Path, *, share: bool) -> Passes:
    """Computes requests that trained as an engine does whose clients are alone."""
    engine = TorchTrainer(TorchConfig(model=str(model), share_prefixes=share))
    models, before, passes = dict[str, Adapter](), dict[str, NDArray[np.float32]](), Passes()
    for request in requests:
        match request.operation:
            case CreateModel(lora=lora, load_from=folder, load_optimizer=optimizer):
                models[request.model_id] = adapter = engine.create(lora)
                if folder is not None:
                    engine.load(adapter, folder, optimizer=optimizer)
                before[request.model_id] = weights_of(engine, adapter)
            case LoadWeights(folder=folder, optimizer=optimizer):
                engine.load(models[request.model_id], folder, optimizer=optimizer)
            case Pass() as operation:
                passes.add(*compute(engine, models[request.model_id], operation, passes))
            case OptimStep(adam=adam):
                engine.optim_step({models[request.model_id]: adam})
            case _:
                pass  # changes no weights
    passes.moved = np.concatenate([weights_of(engine, one) - before[name] for name, one in models.items()])
    return passes


def weights_of(engine: TorchTrainer, model: Adapter) -> NDArray[np.float32]:
    return engine.image(model).tensors["weights"]


def compute(
    engine: TorchTrainer, model: Adapter, operation: Pass, passes: Passes
) -> tuple[list[DatumOutput], dict[str, float]]:
    train, found = not operation.forward_only, dict[int, DatumDone]()
    parts = engine.plan(model, operation)
    begun = engine.begin_pass(model) if train else None
    for part in parts:
        done = engine.forward([part], train=train)
        if train:
            engine.backward(done)
        found.update(zip(part.numbers, done.results[0], strict=True))
        passes.computed += part.tokens
    if train:
        engine.end_pass(model, begun)
    results = [found[n] for n in range(len(operation.data))]
    return [result.output for result in results], combine_metrics([result.metrics for result in results])


def compare(requests: Sequence[Train], served: Passes, model: Path) -> bool:
    shared, alone = (replay(requests, model, share=share) for share in (True, False))
    passes = [request.operation for request in requests if isinstance(request.operation, Pass)]
    print(
        f"  {len(passes)} passes over {sum(len(one.data) for one in passes)} data of {alone.computed:,} tokens;", end=""
    )
    print(f" computed with sharing: {shared.computed:,}, {alone.computed / shared.computed:.2f}x fewer")
    print(f"  losses with sharing: {' '.join(f'{value:.8g}' for value in served.losses)}")
    print(f"              without: {' '.join(f'{value:.8g}' for value in alone.losses)}")
    good = shared.computed < alone.computed and is_close(served, alone)
    is_replayed = served.losses == shared.losses and all(map(np.array_equal, served.logprobs, shared.logprobs))
    print(f"  a replay with sharing has the bits of the server: {is_replayed}")
    if not alone.moved.any():
        print("  all advantages were 0: again, with advantages that are drawn for each datum")
        drawn = with_drawn_advantages(requests)
        shared, alone = (replay(drawn, model, share=share) for share in (True, False))
        good &= is_close(shared, alone)
    apart = float(np.linalg.norm(shared.moved - alone.moved) / np.linalg.norm(alone.moved))
    print(f"  weights at the end differ by {apart:.1e} of how far they have moved", flush=True)
    return good and apart <= WEIGHTS


def is_close(shared: Passes, alone: Passes) -> bool:
    logprob = max(float(np.abs(a - b).max()) for a, b in zip(shared.logprobs, alone.logprobs, strict=True))
    sums = [float(np.abs(logprobs).sum()) for logprobs in alone.logprobs]
    loss = max(abs(a - b) / whole for a, b, whole in zip(shared.losses, alone.losses, sums, strict=True))
    print(f"  they differ by {loss:.1e} of the sum of log-probabilities, each of these by {logprob:.1e} at most")
    return logprob <= LOGPROB and loss <= LOSS


def with_drawn_advantages(requests: Sequence[Train]) -> list[Train]:
    """Random models hardly ever earn a reward."""
    rng, found = np.random.default_rng(0), list[Train]()
    for request in requests:
        operation = request.operation
        if isinstance(operation, Pass):
            data = [_with_advantage(datum, float(rng.normal())) for datum in operation.data]
            request = replace(request, operation=replace(operation, data=data))
        found.append(request)
    return found


def _with_advantage(datum: Datum, advantage: float) -> Datum:
    sampled = decode(datum.loss_inputs["logprobs"], "logprobs") != 0
    advantages = encode(np.where(sampled, advantage, 0.0).astype(np.float32))
    return replace(datum, loss_inputs={**datum.loss_inputs, "advantages": advantages})


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    sys.exit(main())
