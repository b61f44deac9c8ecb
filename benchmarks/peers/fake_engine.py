"""An engine that computes nothing: it holds all samples until a file appears, then answers each with its own identity.

`our_server(..., environment=fake_engine(folder))` makes `palestra serve` start it in place of the real one, by the
interpreter's `sitecustomize`: the product has no such switch. A sample's seed is its identity, and its answer's tokens
say it.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

IDENTITY_BASE = 4096  # tokens are below it
HOLD_S = 0.05
FOLDER = "PALESTRA_FAKE_ENGINE"


def fake_engine(folder: Path) -> dict[str, str]:
    """Returns the environment of a server whose engine is this file. `folder` then has the tally and the gate."""
    folder.mkdir(parents=True, exist_ok=True)
    run = f"runpy.run_path({__file__!r}, run_name='__main__')"
    (folder / "sitecustomize.py").write_text(f"import os, runpy\nif 'PALESTRA_WORKER' in os.environ:\n    {run}\n")
    paths = [str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def identity(number: int) -> list[int]:
    return list(divmod(number, IDENTITY_BASE))


@dataclass(frozen=True, slots=True)
class Tally:
    """What the engine has received and answered."""

    received: int = 0
    distinct: int = 0
    """Different identities among those received."""
    answered: int = 0

    @classmethod
    def read(cls, folder: Path) -> Tally:
        try:
            return cls(**json.loads((folder / "tally.json").read_text()))
        except FileNotFoundError:
            return cls()

    def write(self, folder: Path) -> None:
        new = folder / "tally.new"
        new.write_text(json.dumps({name: getattr(self, name) for name in self.__slots__}))
        new.replace(folder / "tally.json")


def open_gate(folder: Path) -> None:
    (folder / "gate").touch()


@dataclass(slots=True)
class FakeEngine:
    folder: Path
    held: list[tuple[str, int]] = field(default_factory=list)
    """Request ids and identities of samples that are not answered yet."""
    seen: Counter[int] = field(default_factory=Counter)
    answered: int = 0

    def run(self) -> None:
        import msgspec

        from palestra.engine.heartbeat import HeartbeatSender
        from palestra.engine.server_link import ServerLink
        from palestra.types.engine import CancelSample, Hello, ModelCard, Sample, Stop, WorkerConfig

        config = msgspec.json.decode(os.environ["PALESTRA_WORKER"], type=WorkerConfig)
        card = ModelCard(
            folder=config.model,
            architecture="none",
            vocab_size=IDENTITY_BASE,
            max_positions=1 << 20,
            parameters=0,
            dtype="none",
            device="cpu",
        )

        def hello(worker_id: str) -> Hello:
            return Hello(
                pid=os.getpid(),
                worker_id=worker_id,
                card=card,
                models=[],
                sampler_ids=[],
                unstored=[],
                life=config.life,
            )

        link = ServerLink(timeout_s=120, hello=hello)
        link.open(config.address)
        HeartbeatSender(config.address, 2.0, link.worker_id).start()
        written, epoch = 0.0, b""
        while not link.is_lost:
            received = link.receive(HOLD_S)
            if link.epoch != epoch:
                epoch = link.epoch
                self.held.clear()
            for one in received:
                match one.message:
                    case Sample(request_id=request_id, request=request):
                        number = request.params.seed or 0
                        self.held.append((request_id, number))
                        self.seen[number] += 1
                    case CancelSample(request_id=request_id):
                        self.held = [held for held in self.held if held[0] != request_id]
                    case Stop():
                        return
                    case _:
                        pass
            if self.held and (self.folder / "gate").exists():
                self.answer(link)
            if time.monotonic() - written > 0.3:
                written = time.monotonic()
                Tally(self.seen.total(), len(self.seen), self.answered).write(self.folder)

    def answer(self, link) -> None:
        from palestra.types import SampledSequence, SampleResult, StopReason
        from palestra.types.engine import Sampled

        for request_id, number in self.held:
            sequence = SampledSequence(tokens=identity(number), logprobs=[0.0, 0.0], stop_reason=StopReason.LENGTH)
            link.send(Sampled(request_id=request_id, outcome=SampleResult(sequences=[sequence])))
        self.answered += len(self.held)
        self.held.clear()


if __name__ == "__main__":
    FakeEngine(Path(os.environ[FOLDER])).run()
    os._exit(0)
