"""A group of ranks as one backend: rank 0 computes its part of everything, and sends the followers theirs.

Every follower holds all adapters, so that weights and moments are the same bits at every rank after each step. A
request's micro-batches go to ranks by their gradient shards, and its gradient is summed over ranks in the order of the
tree (`model/training/gradient_tree`): its bits do not depend on the number of ranks. A user's errors appear at rank 0
before any follower hears of a request. Whatever fails later, at any rank, ends the group: the server starts it again.

With `tensor`, neighbouring ranks share every layer. They compute the same micro-batches, and those beside rank 0 run
the layers of its sampling steps. Rank 0 schedules, has the logits and draws.

With `context`, neighbouring ranks (or groups of `tensor` ranks) have parts of the rows of the same micro-batches. The
first of them has the results of all rows.

Owns: the followers' processes, who computes what. Never touches: requests, files of models, how tokens are drawn.

What a backend does after a call was sent to its followers goes inside `_together`: they cannot take it back. FSDP is
never given a dataclass that reaches an adapter (`LayerContext`): it walks adapter, snapshot, adapter for ever. A
follower may have aliases for sampling: `before_change` comes before writing a row there, too.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import zmq
from torch import Tensor

from palestra.engine.backend import BackendBroken, DatumDone, Forward, MicroBatch, ModelImage, SampleStep
from palestra.engine.exit_codes import BROKEN, CANNOT_START
from palestra.engine.ranks.calls import (
    BackwardCall,
    BeginPass,
    Call,
    DatumReply,
    DropWeights,
    EndPass,
    ForwardCall,
    ForwardDone,
    FreeModel,
    GatherCall,
    OpenCache,
    PartCall,
    PlaceModel,
    PlaceWeights,
    Quit,
    Ready,
    Reply,
    SampleCall,
    StepCall,
    StepReply,
    UndoPass,
    decode_reply,
    encode,
)
from palestra.engine.ranks.follower import FollowerConfig
from palestra.engine.ranks.process_group import ProcessGroup
from palestra.engine.torch_backend import TorchBackend
from palestra.engine.torch_trainer import Begun, TorchConfig, rows_in_use
from palestra.model import Adapter
from palestra.model.sampling.planned_step import PlannedStep
from palestra.model.sampling.sampler import RowAdapters
from palestra.model.sampling.sequences import StepPlan
from palestra.model.tensor_group import TensorGroup
from palestra.model.training.prepared import Prepared
from palestra.types import AdamParams, LoraConfig
from palestra.types.engine import Pass, RanksMeeting, WorkerConfig
from palestra.util.processes import PIPE, spawn_blocking

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Reply)


class GroupBackend(TorchBackend):
    def __init__(self, config: WorkerConfig):
        self.processes, self.tensor, self.context = len(config.devices), config.tensor, config.context
        self._members = self.tensor * self.context
        self.ranks = self.processes // self._members
        """Groups of processes that share every layer or every micro-batch: each computes micro-batches of its own."""
        self._followers = Followers(config)
        device = torch.device(config.devices[0])
        shape = self.tensor, self.context
        self.group = ProcessGroup(self._followers.meeting, 0, self.processes, device, *shape)
        self._layers_group, context = self.group.tensor_group(), self.group.context_group()
        super().__init__(TorchConfig.of(config, 0), self.group.shard_mesh(config.shard), self._layers_group, context)
        self._run_layers, self._has_sent = self.model.decoder.sharded, False
        if self._run_layers is not None:
            super().forward([], train=False)  # FSDP makes its tensors here, not in the sampler's inference mode
            self.model.decoder.sharded = self._run_with_all
        self._followers.wait_ready()
        self._shared_weights: set[int] = set()
        """The `weights_id` of all that the ranks that sample with this one have."""
        if self._layers_group is not None:
            self._followers.send(OpenCache(self.sampler.pages.n_pages, self.sampler.pages.page_size), *self._helpers)
            self.sampler.around_layers = self._sample_together
        self._turn = 0
        self._ranks_of: dict[int, set[int]] = {}
        """By model: the ranks that have computed something of the request that trains it now."""

    # Models

    def create(self, lora: LoraConfig) -> Adapter:
        return self._share(super().create(lora))

    def load(self, model: Adapter, folder: str, *, optimizer: bool) -> None:
        super().load(model, folder, optimizer=optimizer)
        self._share(model)

    def restore(self, lora: LoraConfig, image: ModelImage) -> Adapter:
        return self._share(super().restore(lora, image))

    def free(self, weights: Adapter) -> None:
        is_trained = not weights.frozen
        super().free(weights)
        self._ranks_of.pop(weights.uid, None)
        if is_trained:
            self._followers.send(FreeModel(weights.uid))

    def _share(self, model: Adapter) -> Adapter:
        with self._together():
            rows = rows_in_use(model)
            self._followers.send(PlaceModel(model.uid, model.config, model.steps, rows))
            for kind in rows:
                self.group.broadcast(model.row(kind))
        return model

    # Training

    def plan(self, model: Adapter, request: Pass) -> list[MicroBatch]:
        """Gradient shards go to ranks in turns that differ from request to request, so that small ones are spread. The
        turn changes which rank has which part of the tree, never the tree."""
        parts, self._turn = super().plan(model, request), self._turn + 1
        return [self._placed(part, model, request) for part in parts]

    def _placed(self, part: MicroBatch, model: Adapter, request: Pass) -> MicroBatch:
        rank = (part.gradient_shard ^ self._turn) % self.ranks
        config: Any = request.config
        data = [request.data[i] for i in part.numbers]
        call = PartCall(model.uid, part.gradient_shard, request.loss, config, data)
        return replace(part, rank=rank, data=PlacedPart(call, part.data))

    def forward(self, parts: Sequence[MicroBatch], *, train: bool) -> Forward:
        by_rank: dict[int, list[MicroBatch]] = {}
        for part in parts:
            by_rank.setdefault(part.rank, []).append(part)
            if train:
                self._ranks_of[part.data.call.model].add(part.rank)
        if self._run_layers is not None:
            by_rank = {rank: by_rank.get(rank, []) for rank in range(self.ranks)}
        others = [process for rank in by_rank for process in self._processes_of(rank) if process > 0]
        with self._together():
            calls = {rank: ForwardCall([part.data.call for part in theirs], train) for rank, theirs in by_rank.items()}
            for process in others:
                self._followers.send(calls[process // self._members], process)
            done = None
            if 0 in by_rank:
                own = [replace(part, data=part.data.own) for part in by_rank[0]]
                done = super().forward(own, train=train)
            replies = {process: self._followers.answer(process, ForwardDone) for process in others}
        results = {rank: iter(_results(replies[first])) for rank in by_rank if (first := rank * self._members) > 0}
        results[0] = iter(done.results if done else ())
        found = [next(results[part.rank]) for part in parts]
        return Forward(found, GroupPass(done, others) if train else None)

    def _processes_of(self, rank: int) -> range:
        return range(rank * self._members, (rank + 1) * self._members)

    def backward(self, forward: Forward) -> None:
        group_pass: GroupPass = forward.pending
        with self._together():
            for rank in group_pass.others:
                self._followers.send(BackwardCall(), rank)
            if group_pass.own is not None:
                super().backward(group_pass.own)

    def begin_pass(self, model: Adapter) -> Begun:
        self._ranks_of[model.uid] = set()
        with self._together():
            self._followers.send(BeginPass(model.uid))
            return super().begin_pass(model)

    def end_pass(self, model: Adapter, begun: Begun) -> None:
        ranks = self._ranks_of.pop(model.uid)
        with self._together():
            self._followers.send(EndPass(model.uid, sorted(ranks)))
            self.sum_pass(model, begun, lambda row: self.group.sum_gradients(row, ranks))

    def undo_pass(self, model: Adapter, begun: Begun) -> None:
        self._ranks_of.pop(model.uid, None)
        with self._together():
            self._followers.send(UndoPass(model.uid))
            super().undo_pass(model, begun)

    def optim_step(self, steps: Mapping[Adapter, AdamParams]) -> dict[Adapter, dict[str, float] | Exception]:
        with self._together():
            self._followers.send(StepCall([(model.uid, adam) for model, adam in steps.items()]))
            results = self.trainer.optim_step(dict(steps))
            norms = [result.metrics.get("grad_norm") for result in results.values()]
            for rank in range(1, self.processes):
                other = self._followers.answer(rank, StepReply).norms
                if other != norms:
                    raise BackendBroken(f"rank {rank} has gradients of norm {other}, rank 0 has {norms}")
        return {model: result.error or result.metrics for model, result in results.items()}

    # Sampling

    @property
    def _helpers(self) -> range:
        """The ranks that compute every layer together with this one."""
        return range(1, self.tensor)

    @contextmanager
    def _sample_together(self, plan: StepPlan, tokens: Tensor, adapters: RowAdapters) -> Iterator[None]:
        assert self._layers_group is not None
        with self._together():
            for adapter, _ in adapters:
                if adapter is not None and adapter.weights_id not in self._shared_weights:
                    self._share_weights(adapter, self._layers_group)
            runs = [(None if adapter is None else adapter.weights_id, rows) for adapter, rows in adapters]
            self._followers.send(SampleCall(PlannedStep.of(plan), runs), *self._helpers)
            self._layers_group.broadcast(tokens)
            yield

    def _share_weights(self, frozen: Adapter, group: TensorGroup) -> None:
        """Shares weights by their model's name if they are still those of a model in training, which every rank has."""
        model = None if frozen.original is None else frozen.original.uid
        self._followers.send(PlaceWeights(frozen.weights_id, frozen.config, model), *self._helpers)
        if model is None:
            group.broadcast(frozen.row("weights"))
        self._shared_weights.add(frozen.weights_id)

    def sample_step(self) -> SampleStep:
        step = super().sample_step()
        self._drop_unused_weights()
        return step

    def abort(self, number: int) -> None:
        super().abort(number)
        self._drop_unused_weights()

    def _drop_unused_weights(self) -> None:
        if unused := sorted(self._shared_weights.difference(self.sampler.weights_in_use)):
            self._shared_weights.difference_update(unused)
            self._followers.send(DropWeights(unused), *self._helpers)

    # Ends

    def save_memory(self, error: Exception) -> str | None:
        return None  # the ranks would have to agree, and others may wait in a meeting: the group begins anew

    def is_broken(self, error: BaseException) -> bool:
        return isinstance(error, BackendBroken) or super().is_broken(error)

    def close(self) -> None:
        self._followers.quit()
        self.group.close()
        self._followers.wait_ended()

    def _run_with_all(self, *args: Any, **options: Any) -> Any:
        """Runs layers whose weights are gathered: with the followers, who know of training and not of sampling."""
        assert self._run_layers is not None
        if self._has_sent:
            return self._run_layers(*args, **options)
        with self._together():
            self._followers.send(GatherCall())
            return self._run_layers(*args, **options)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Wraps a call that was sent to the followers: they cannot take it back, so an error here ends the group."""
        self._has_sent = True
        try:
            yield
        except BackendBroken:
            raise
        except Exception as e:
            raise BackendBroken(f"rank 0: {e!r}") from e
        finally:
            self._has_sent = False


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """A micro-batch that any rank may compute."""

    call: PartCall
    own: list[Prepared]
    """The same, as rank 0 computes it."""


@dataclass(frozen=True, slots=True)
class GroupPass:
    """A forward whose backward must follow."""

    own: Forward | None
    """What rank 0 computed; None if it had no part."""
    others: list[int]
    """The ranks that computed the rest."""


class Followers:
    """The processes of all ranks but the first, and the line to them."""

    def __init__(self, config: WorkerConfig):
        self._ranks = range(1, len(config.devices))
        self._folder: Path | None = None
        """Where ranks on one machine meet."""
        self._is_ending = False
        self._inbox: dict[int, deque[Reply]] = {rank: deque() for rank in self._ranks}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0), (zmq.ROUTER_MANDATORY, 1)):
            self._socket.setsockopt(option, value)
        self._processes: list[subprocess.Popen[bytes]] = []
        if config.meeting is None:
            self._start(config)
        else:
            self._listen(config, config.meeting)

    def _listen(self, config: WorkerConfig, at: RanksMeeting) -> None:
        """The server starts the others, on other machines, and ends this process when one of them has ended."""
        self._life, self.meeting = config.life, f"{at.host}:{at.store_port}"
        self._socket.curve_secretkey, self._socket.curve_server = at.secret_key.encode(), True
        self._socket.bind(f"tcp://{at.host}:{at.calls_port}")

    def _start(self, config: WorkerConfig) -> None:
        self._folder = Path(config.state) / "ranks"
        shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier life
        self._folder.mkdir(parents=True)
        self._life, self.meeting = uuid.uuid4().hex, str(self._folder.absolute())
        address = f"{config.address}.ranks"
        self._socket.bind(address)
        for rank in self._ranks:
            place = FollowerConfig(rank=rank, address=address, life=self._life, meeting=self.meeting)
            environment = os.environ | {"PALESTRA_FOLLOWER": msgspec.json.encode(place).decode()}
            # Their output is ours; the pipe ends when we do, and so do they.
            process = spawn_blocking(
                [sys.executable, "-m", "palestra.engine"], stdin=PIPE, output=None, env=environment
            )
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def wait_ready(self) -> None:
        for rank in self._ranks:
            self.answer(rank, Ready)

    def send(self, call: Call, *ranks: int) -> None:
        """Sends a call to these followers, or to all of them."""
        payload = encode(call)
        for to in ranks or self._ranks:
            try:
                self._socket.send_multipart([f"{self._life}/{to}".encode(), payload], copy=False)
            except zmq.ZMQError as e:  # it has died, and no request is to blame
                raise BackendBroken(f"rank {to} cannot be reached: {e}") from e

    def answer(self, rank: int, kind: type[T]) -> T:
        while not self._inbox[rank]:
            sender, payload = self._socket.recv_multipart()
            life, _, number = sender.decode().partition("/")
            if life == self._life:
                self._inbox[int(number)].append(decode_reply(payload))
        reply = self._inbox[rank].popleft()
        if not isinstance(reply, kind):
            raise BackendBroken(f"rank {rank} said {type(reply).__name__} in place of {kind.__name__}")
        return reply

    def quit(self) -> None:
        self._is_ending = True
        self.send(Quit())

    def wait_ended(self) -> None:
        for process in self._processes:
            process.wait()
        self._socket.close()
        self._context.term()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """The end of a follower is the end of the group, whatever this process is waiting for."""
        code = process.wait()
        if not self._is_ending:
            log.error("rank_ended rank=%d code=%d", rank, code)
            os._exit(CANNOT_START if code == CANNOT_START else BROKEN)


def _results(done: ForwardDone) -> list[list[DatumDone]]:
    return [[_datum(reply) for reply in part] for part in done.results]


def _datum(reply: DatumReply) -> DatumDone:
    visits = None if reply.visits is None else np.frombuffer(reply.visits, "<i8")
    return DatumDone(reply.output, reply.metrics, visits)
