"""A follower: a rank of a group that does what rank 0 says, and ends when rank 0 does.

Owns: the follower's loop. Never touches: requests, files, the server.
"""

from __future__ import annotations

import os
import threading

import msgspec
import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from palestra.engine.backend import DatumDone, Forward, MicroBatch
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
    decode_call,
    encode,
)
from palestra.engine.ranks.process_group import ProcessGroup
from palestra.engine.server_link import encrypt
from palestra.engine.torch_trainer import Begun, TorchConfig, TorchTrainer
from palestra.model import Adapter, TrainItem
from palestra.model.lora.layout import Layout
from palestra.model.sampling.planned_step import StepFollower
from palestra.types.engine import WorkerConfig

STDIN = 0


class FollowerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a follower beside the worker's, as JSON in the variable PALESTRA_FOLLOWER."""

    rank: int
    address: str
    """Where rank 0 binds for calls."""
    life: str
    """Made at the start of rank 0: what an earlier life left behind is not answered."""
    meeting: str
    """A new folder for this life; of a group on several machines, host:port at rank 0."""
    server_key: str | None = None
    """Public CURVE key of rank 0, where calls go over the network."""

    @classmethod
    def elsewhere(cls, config: WorkerConfig, rank: int) -> FollowerConfig:
        """Whether this rank is on another machine than rank 0."""
        at = config.meeting
        assert at is not None
        return cls(
            rank=rank,
            address=f"tcp://{at.host}:{at.calls_port}",
            life=config.life,
            meeting=f"{at.host}:{at.store_port}",
            server_key=zmq.curve_public(at.secret_key.encode()).decode(),
        )


class Follower:
    def __init__(self, config: WorkerConfig, place: FollowerConfig):
        device = torch.device(config.devices[place.rank])
        shape = config.tensor, config.context
        self.group = ProcessGroup(place.meeting, place.rank, len(config.devices), device, *shape)
        self._tensor, context = self.group.tensor_group(), self.group.context_group()
        mesh = self.group.shard_mesh(config.shard)
        self.trainer = TorchTrainer(TorchConfig.of(config, place.rank), mesh, self._tensor, context)
        self._models: dict[int, Adapter] = {}
        self._begun: dict[int, Begun] = {}
        self._half_done: Forward | None = None
        self._steps: StepFollower | None = None
        self._weights: dict[int, Adapter] = {}
        """For sampling, by `weights_id`."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"{place.life}/{place.rank}".encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        encrypt(self._socket, place.server_key, config.meeting and config.meeting.secret_key)
        if place.server_key is not None:
            end_with_connection(self._socket)
        self._socket.connect(place.address)
        if config.shard > 1:
            self.trainer.forward([], train=False)  # with rank 0's first one
        self._say(Ready())

    def run(self) -> None:
        while True:
            call = decode_call(self._socket.recv())
            if isinstance(call, Quit):
                self.group.close()
                return
            self._do(call)

    def _say(self, reply: Reply) -> None:
        self._socket.send(encode(reply))

    def _do(self, call: Call) -> None:
        trainer, models = self.trainer, self._models
        match call:
            case PlaceModel():
                self._place(call)
            case FreeModel(model=number):
                self._begun.pop(number, None)
                trainer.free(models.pop(number))
            case BeginPass(model=number):
                self._begun[number] = trainer.begin_pass(models[number])
            case ForwardCall(parts=parts, train=train):
                done = trainer.forward([self._part(part, train) for part in parts], train=train)
                self._half_done = done if train else None
                self._say(ForwardDone([[_reply(datum) for datum in part] for part in done.results]))
            case GatherCall():
                trainer.forward([], train=False)
            case BackwardCall():
                if self._half_done is not None:
                    trainer.backward(self._half_done)
                    self._half_done = None
            case EndPass(model=number, ranks=ranks):
                trainer.sum_pass(
                    models[number], self._begun.pop(number), lambda row: self.group.sum_gradients(row, ranks)
                )
            case UndoPass(model=number):
                trainer.undo_pass(models[number], self._begun.pop(number))
            case StepCall(steps=steps):
                results = trainer.trainer.optim_step({models[number]: adam for number, adam in steps})
                self._say(StepReply([result.metrics.get("grad_norm") for result in results.values()]))
            case OpenCache(n_pages=n_pages, page_size=page_size):
                self._steps = StepFollower(trainer.model.decoder, n_pages, page_size)
            case PlaceWeights():
                self._place_weights(call)
            case DropWeights(weights_ids=weights_ids):
                for weights_id in weights_ids:
                    trainer.pool.free(self._weights.pop(weights_id))
            case SampleCall(step=step, adapters=adapters):
                assert self._tensor is not None
                assert self._steps is not None
                tokens = torch.empty(step.n_tokens, dtype=torch.int64, device=trainer.model.decoder.device)
                self._tensor.broadcast(tokens)
                self._steps.run(step, tokens, [(None if n is None else self._weights[n], r) for n, r in adapters])

    def _place_weights(self, call: PlaceWeights) -> None:
        pool = self.trainer.pool
        if call.model is not None:
            self._weights[call.weights_id] = pool.snapshot(self._models[call.model])
            return
        assert self._tensor is not None
        row = torch.empty(Layout.of(pool.spec, call.lora).size, device=pool.device)
        self._tensor.broadcast(row)
        self._weights[call.weights_id] = pool.freeze(call.lora, row)

    def _place(self, call: PlaceModel) -> None:
        pool = self.trainer.pool
        model = self._models.get(call.model)
        if model is None:
            model = self._models[call.model] = pool.create(call.lora)
        pool.before_change(model)
        pool.clear_training_state(model)
        for kind in call.rows:
            self.group.broadcast(model.row(kind))
        model.steps, model.has_gradient = call.steps, "grads" in call.rows
        pool.after_change(model)

    def _part(self, call: PartCall, train: bool) -> MicroBatch:
        items = [TrainItem(self._models[call.model], datum, call.loss, call.config) for datum in call.data]
        data = self.trainer.trainer.prepare(items, train=train)
        tokens = sum(len(datum.tokens) for datum in data)
        return MicroBatch(list(range(len(data))), tokens, data[0].targets.shape[1], data, call.gradient_shard)


def _reply(datum: DatumDone) -> DatumReply:
    visits = None if datum.visits is None else datum.visits.astype("<i8").tobytes()
    return DatumReply(datum.output, datum.metrics, visits)


def end_with_connection(socket: zmq.Socket) -> None:
    """Rank 0 is on another machine: the end of the connection to it is the end of this process."""
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def wait() -> None:
        recv_monitor_message(monitor)
        os._exit(0)

    threading.Thread(target=wait, name="connection", daemon=True).start()


def end_with_rank_0() -> None:
    """Ends this process with its starter, which holds the other end of its stdin: rank 0 or an actor on this machine:
    its end is the end of the file, whatever is computed now."""

    def wait() -> None:
        while os.read(STDIN, 1):  # not by sys.stdin, whose lock an exit of this process would wait for
            pass
        os._exit(0)

    threading.Thread(target=wait, name="rank 0", daemon=True).start()
