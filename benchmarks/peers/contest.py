"""Finding each peer's best configuration in a short pilot, then timing it alternately with ours."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from harness import Contender, Measure, Progress, Row, alternate, figure
from peers.ours import Ours
from peers.train_memory import MemoryJob, peak_mib
from peers.workloads import SampleWork, TrainWork, sampling_contender, training_contender

from palestra.model import Model, load_model

Setup = TypeVar("Setup", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Target:
    ratio: float | None = None
    value: float | None = None


@dataclass(slots=True)
class Contest:
    """One model on one device, and how thoroughly it is measured."""

    shape: str
    folder: Path
    dtype: str
    device: str
    rounds: int
    quick: bool
    progress: Progress
    notes: list[str]
    model: Model | None = None
    """Not in the folder, but drawn; it has no peers."""
    ours: Ours = field(init=False)
    _models: dict[tuple[str, str], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ours = Ours(self.model or load_model(self.folder, dtype=self.dtype, device=self.device))

    @property
    def is_short(self) -> bool:
        """Whether a run takes seconds, so that the workload can be whole and everyone warmed up once more."""
        return self.shape == "tiny" or self.device != "cpu"

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self.progress.say(text)

    # Sampling

    def sample(self, what: str, work: SampleWork, target: Target, *, batches: Iterable[int]) -> list[Row]:
        """Where output lengths differ there is a second row: a peer that sorts by what it can know, the prompt."""
        generate = sampling_contender(work, self.ours.vocab_size, self.ours.sampler(work), self.ours.device)
        self.progress.say(f"{what}, pilot: ours: {figure(generate())} tok/s")
        pilot = self._sampling_pilot(what, work, batches)
        by_output = [s for s in pilot if getattr(s, "order", None) == "output"]
        blind = max((s for s in pilot if s not in by_output), key=lambda s: pilot[s], default=None)
        chosen = list(dict.fromkeys([*self._best(pilot), *([blind] if by_output and blind else [])]))
        with ExitStack() as stack:
            peers = {str(s): self._open(work, s, stack) for s in chosen}
            measured = self._alternate({"ours": generate} | peers)
        rows = [_row(what, "tok/s", measured, target)]
        if blind and rows[0].peer in [str(s) for s in by_output]:
            known = {"ours": measured["ours"], str(blind): measured[str(blind)]}
            rows.append(_row(f"{what}, outputs unknown to peer", "tok/s", known, Target()))
        return rows

    def _sampling_pilot(self, what: str, work: SampleWork, batches: Iterable[int]) -> dict[Any, float]:
        try:
            from peers.hugging_face import ContinuousSetup, GenerateSetup, Order
        except ImportError as e:
            self.note(f"transformers: not available: {e}; pip install transformers")
            return {}
        sequences = len(work.prompt_lengths) * work.samples
        is_ragged = len(set(work.output_lengths)) > 1
        orders: list[Order] = ["output", "prompt"] if is_ragged else ["prompt"]
        if self.quick:
            orders = orders[:1]
        sizes = dict.fromkeys(min(b, sequences) for b in batches)
        with ExitStack() as stack:  # what the library does once must not fall on whoever is first
            self._open(SampleWork.uniform(2, 8, 4), GenerateSetup("sdpa", 2), stack)()
        setups = [GenerateSetup("sdpa", b, o) for b in sizes for o in (orders if b < sequences else orders[-1:])]
        figures = self._pilot(what, setups, self._opener(work), "tok/s")
        if figures and not self.quick:
            best = max(figures, key=lambda s: figures[s])
            figures |= self._pilot(what, [replace(best, attention="eager")], self._opener(work), "tok/s")
        if self.ours.device.type == "cuda":
            continuous = [ContinuousSetup(sequences, None, flash=flash) for flash in (True, False)]
        elif self.quick:  # one setting, and only where it has a chance
            continuous = [ContinuousSetup(16, 512)] if is_ragged else []
        else:
            limits = [(64, 2048), (32, 512), (16, 512)]
            continuous = [ContinuousSetup(min(n, sequences), tokens) for n, tokens in limits]
        return {**figures, **self._pilot(what, list(dict.fromkeys(continuous)), self._opener(work), "tok/s")}

    def _opener(self, work: SampleWork) -> Callable[[Any, ExitStack], Contender]:
        return lambda setup, stack: self._open(work, setup, stack)

    def _open(self, work: SampleWork, setup: Any, stack: ExitStack) -> Contender:
        from peers.hugging_face import Continuous, GenerateSetup, generate_with

        vocab_size, device = self.ours.vocab_size, self.ours.device
        if isinstance(setup, GenerateSetup):
            generate = generate_with(self._model(setup.attention), work, setup)
            return sampling_contender(work, vocab_size, generate, device)
        # A model of its own: continuous batching may switch the attention of the one it is given.
        engine = Continuous(self._model("sdpa", "continuous"), work, setup)
        stack.callback(engine.close)
        return sampling_contender(work, vocab_size, engine.generate, device, engine.running)

    def _model(self, attention: str, use: str = "generate") -> Any:
        from peers.hugging_face import load

        if (attention, use) not in self._models:
            self._models[attention, use] = load(self.folder, attention=attention, dtype=self.dtype, device=self.device)
        return self._models[attention, use]

    # Training

    def train(self, what: str, work: TrainWork, target: Target, *, batches: Iterable[int]) -> list[Row]:
        adapters = self.ours.adapters(1)
        step = self.ours.stepper(work, adapters[0])
        first_loss = step()
        peers = self._peft(what, work, first_loss, batches)
        ours = {"ours": training_contender(step, work.tokens, self.ours.device)}
        measured = self._alternate(ours | {str(setup): run for setup, run in peers.items()})
        self.ours.free(adapters)
        memory = self._memory(work, [setup for setup in peers if str(setup) == _fastest(measured)])
        no_more = Target(ratio=1.0) if target.ratio else Target()
        return [
            _row(what, "tok/s", measured, target),
            _row(f"{what}, peak memory", "MiB", memory, no_more, less_is_better=True),
        ]

    def _peft(self, what: str, work: TrainWork, first_loss: float, batches: Iterable[int]) -> dict[Any, Contender]:
        """The finalists."""
        try:
            from peers.peft_training import PeftSetup, PeftTrainer
        except ImportError as e:
            self.note(f"PEFT: not available: {e}; pip install peft transformers")
            return {}
        peft = PeftTrainer(self.folder, dtype=self.dtype, device=self.device)

        def start(setup: PeftSetup, _: ExitStack | None = None) -> Contender:
            return training_contender(peft.stepper(work, setup), work.tokens, self.ours.device)

        setups = [PeftSetup(b) for b in batches]
        self._check_same_loss(first_loss, peft.stepper(work, setups[0])())
        pilot = self._pilot(what, setups, start, "tok/s")
        if pilot and not self.quick:
            best = max(pilot, key=lambda s: pilot[s])
            pilot |= self._pilot(what, [replace(best, masked=False)], start, "tok/s")
        return {setup: start(setup) for setup in self._best(pilot)}

    def _memory(self, work: TrainWork, peers: list[Any]) -> dict[str, Measure]:
        self.release()
        self.progress.doing("peak memory")
        ours = self._memory_job(work)
        jobs = {"ours": ours} | {str(p): replace(ours, side="peft", batch=p.batch, masked=p.masked) for p in peers}
        # Nothing is timed, and a process's memory is its own; a GPU's is shared, so there one after another.
        with ThreadPoolExecutor(len(jobs) if self.device == "cpu" else 1) as several:
            return {name: Measure((mib,)) for name, mib in zip(jobs, several.map(peak_mib, jobs.values()), strict=True)}

    def _memory_job(self, work: TrainWork) -> MemoryJob:
        return MemoryJob("ours", str(self.folder), work.lengths, self.dtype, self.device)

    def memory_alone(self, what: str, work: TrainWork, target: Target, *, checkpointing: bool = False) -> Row:
        self.progress.doing(what)
        mib = peak_mib(replace(self._memory_job(work), checkpointing=checkpointing))
        return _row(what, "MiB", {"ours": Measure((mib,))}, target, less_is_better=True)

    def _check_same_loss(self, ours: float, peer: float) -> None:
        """Fresh adapters change nothing, so both sides stand at the base model's loss, or they do different work."""
        tolerance = 1e-4 if self.dtype == "float32" else 2e-2
        if abs(ours - peer) > tolerance * abs(peer):
            raise RuntimeError(f"ours and the peer do not train on the same loss: {ours} and {peer}")

    # Ours alone, and against ours

    def alone(self, what: str, unit: str, ours: Contender, target: Target) -> Row:
        measured = alternate({"ours": ours}, self.rounds, warmups=1, progress=self.progress)
        self.progress.say(f"{what}: {figure(measured['ours'].median)} {unit}")
        return _row(what, unit, measured, target)

    def versus(self, what: str, unit: str, ours: Contender, peer: tuple[str, Contender], target: Target) -> Row:
        measured = alternate({"ours": ours, peer[0]: peer[1]}, self.rounds, warmups=1, progress=self.progress)
        self.progress.say(f"{what}: {figure(measured['ours'].median)} and {figure(measured[peer[0]].median)} {unit}")
        return _row(what, unit, measured, target)

    # How

    def _pilot(
        self, what: str, setups: list[Setup], start: Callable[[Setup, ExitStack], Contender], unit: str
    ) -> dict[Setup, float]:
        """One run of each; what fails is told and left out."""
        figures: dict[Setup, float] = {}
        for setup in setups:
            self.progress.doing(f"{what}, pilot: {setup}")
            try:
                with ExitStack() as stack:
                    figures[setup] = start(setup, stack)()
            except Exception as e:  # whatever stops a peer here, the others go on
                reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
                self.note(f"{what}: {setup}: not available: {reason}")
            else:
                self.progress.say(f"{what}, pilot: {setup}: {figure(figures[setup])} {unit}")
            self.release()
        return figures

    def _best(self, pilot: dict[Setup, float]) -> list[Setup]:
        """One run tells no close winner: the full benchmark times the best two."""
        return sorted(pilot, key=lambda s: -pilot[s])[: 1 if self.quick else 2]

    def _alternate(self, contenders: dict[str, Contender]) -> dict[str, Measure]:
        """In a quick run, and where a run takes a minute, the pilot was the warm-up."""
        warmups = 0 if self.quick or not self.is_short else 1
        return alternate(contenders, self.rounds, warmups=warmups, progress=self.progress)

    def release(self) -> None:
        gc.collect()
        if self.ours.device.type == "cuda":
            torch.cuda.empty_cache()


def _fastest(measured: dict[str, Measure]) -> str | None:
    peers = [name for name in measured if name != "ours"]
    return max(peers, key=lambda name: measured[name].median, default=None)


def _row(what: str, unit: str, measured: dict[str, Measure], target: Target, *, less_is_better: bool = False) -> Row:
    peer = _fastest(measured)
    return Row(
        what,
        unit,
        measured["ours"],
        peer,
        measured[peer] if peer else None,
        target_ratio=target.ratio,
        target_value=target.value,
        less_is_better=less_is_better,
    )
