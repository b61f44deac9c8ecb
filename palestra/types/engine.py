"""Messages between server and engine worker: msgpack over ZeroMQ, one record per message.

The server numbers, orders and keeps; the worker computes. Every training request carries its model and `seq_id`: the
server sends those of one model in order and without gaps it has not settled, the worker applies each exactly once.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec
from msgspec import Struct

from palestra.types.pictures import Picture, VisionCard
from palestra.types.sampling import SampleRequest, SampleResult, TopLogprobs
from palestra.types.training import AdamParams, Checkpointing, Datum, LoraConfig

# What to do with a model


class CreateModel(Struct, frozen=True, kw_only=True, tag="create_model"):
    lora: LoraConfig
    load_from: str | None = None
    """A checkpoint folder to start from."""
    load_optimizer: bool = False


class Pass(Struct, frozen=True, kw_only=True, tag="pass"):
    """A forward or forward_backward request."""

    data: list[Datum]
    loss: str
    config: dict[str, float | str] = {}
    forward_only: bool = False
    pictures: tuple[Picture, ...] = ()
    """The pictures that the data name, each once."""


class OptimStep(Struct, frozen=True, kw_only=True, tag="optim_step"):
    adam: AdamParams


class SaveWeights(Struct, frozen=True, kw_only=True, tag="save_weights"):
    """Saves weights as a PEFT folder, atomically. If `folder` already exists, the worker wrote it before a restart."""

    folder: str
    optimizer: bool


class KeepSampler(Struct, frozen=True, kw_only=True, tag="keep_sampler"):
    """Freezes the current weights under a name, until `DropSamplers`."""

    sampler_id: str


class LoadWeights(Struct, frozen=True, kw_only=True, tag="load_weights"):
    folder: str
    optimizer: bool


class Skip(Struct, frozen=True, tag="skip"):
    """Replaces a request that has failed when a model is replayed: it fails again."""


Operation = CreateModel | Pass | OptimStep | SaveWeights | KeepSampler | LoadWeights | Skip


class Train(Struct, frozen=True, kw_only=True, tag="train"):
    """The next request of a model. `CreateModel` is number 0."""

    request_id: str
    model_id: str
    seq_id: int
    operation: Operation


# Which weights to sample


class BaseModel(Struct, frozen=True, tag="base"):
    pass


class KeptSampler(Struct, frozen=True, kw_only=True, tag="kept"):
    """A sampler made by `KeepSampler`. It exists once its model has applied `seq_id`; a sample that arrives earlier
    waits."""

    sampler_id: str
    model_id: str
    seq_id: int


class SavedAdapter(Struct, frozen=True, kw_only=True, tag="saved"):
    """A checkpoint folder to sample from, read at first use."""

    folder: str


class PlacedAdapter(Struct, frozen=True, kw_only=True, tag="placed"):
    """An adapter that a replica got by `PlaceAdapter`."""

    digest: str


SampleWeights = BaseModel | KeptSampler | SavedAdapter | PlacedAdapter


class Sample(Struct, frozen=True, kw_only=True, tag="sample"):
    request_id: str
    weights: SampleWeights
    request: SampleRequest
    stream: bool = False
    """Send tokens as they are drawn, and all of them again in the result."""


# The other things a server says


class Welcome(Struct, frozen=True, kw_only=True, tag="welcome"):
    """Answers `Hello`. A new `epoch`: the server forgot its samples, the worker drops them."""

    epoch: str


class CancelSample(Struct, frozen=True, kw_only=True, tag="cancel_sample"):
    request_id: str


class ChangeWeights(Struct, frozen=True, kw_only=True, tag="change_weights"):
    """These samples go on with other weights. Those that have ended, or that ask for logprobs of their prompt, do
    not."""

    request_ids: list[str]
    weights: KeptSampler
    keeps_keys: bool
    """Keys and values that older weights have computed stay; otherwise they are computed anew."""


class OwnModel(Struct, frozen=True, kw_only=True, tag="own_model"):
    """Says whose a model is, before its first request: owners take turns."""

    model_id: str
    owner: str


class DropModel(Struct, frozen=True, kw_only=True, tag="drop_model"):
    """Removes a model at once, with everything queued for it. Kept samplers stay; an unknown model is ignored."""

    model_id: str


class DropSamplers(Struct, frozen=True, kw_only=True, tag="drop_samplers"):
    sampler_ids: list[str]


class Stored(Struct, frozen=True, kw_only=True, tag="stored"):
    """These results are on disk at the server: the worker may forget them."""

    request_ids: list[str]


class Ping(Struct, frozen=True, tag="ping"):
    """Sign of life of the server. A worker that hears nothing for long exits."""


class Stop(Struct, frozen=True, tag="stop"):
    """Asks the worker to snapshot every changed model and exit."""


# Adapters on their way from the worker that trains them to the replicas that sample from them


class SendAdapter(Struct, frozen=True, kw_only=True, tag="send_adapter"):
    """Asks the worker that trains for an adapter, which comes in parts. One that does not exist yet is waited for."""

    transfer_id: str
    weights: KeptSampler | SavedAdapter


class AdapterPart(Struct, frozen=True, kw_only=True, tag="adapter_part"):
    """A part of an adapter's file, which is PEFT's with its config in the metadata. From the worker that trains to the
    server, and from there to replicas."""

    transfer_id: str
    """Between server and replica: the digest."""
    digest: str
    """SHA-256 of the whole file."""
    size_bytes: int
    """Size of the whole file. 0: the server no longer has it."""
    offset: int
    data: bytes
    lora: LoraConfig | None = None
    """From the worker that trains: the shape of the adapter."""


class PlaceAdapter(Struct, frozen=True, kw_only=True, tag="place_adapter"):
    """Asks a replica to get an adapter and keep it until `DropAdapters`. It answers with `AdapterPlaced`."""

    digest: str


class DropAdapters(Struct, frozen=True, kw_only=True, tag="drop_adapters"):
    digests: list[str]


# Files between the server and a worker on another machine


class FileArea(StrEnum):
    """Where a file is at the server."""

    STATE = "state"
    """Copies of the worker's own files: snapshots and frozen samplers. A path is relative to the worker's folder."""
    MODEL = "model"
    """The base model. A path is relative to its folder."""
    CHECKPOINTS = "checkpoints"
    """Checkpoints of the server. A path is that of a request."""


class FileEntry(Struct, frozen=True, array_like=True):
    path: str
    size_bytes: int
    digest: str
    """SHA-256."""


class FileListing(Struct, frozen=True, kw_only=True, tag="file_listing"):
    """Answers `ListFiles`."""

    area: FileArea
    folder: str
    files: list[FileEntry]
    error: str = ""


class FilePart(Struct, frozen=True, kw_only=True, tag="file_part"):
    """A part of a file, in either direction. From the worker: parts come in order, and each is answered by
    `FileStored`."""

    area: FileArea
    path: str
    offset: int
    data: bytes
    transfer_id: str = ""
    """From the worker: another one for each time that a file is sent."""
    digest: str = ""
    """From the worker, with the last part: SHA-256 of the whole file."""
    error: str = ""
    """From the server: why there is no such part."""


class FileStored(Struct, frozen=True, kw_only=True, tag="file_stored"):
    """A part has arrived; the last one, or a folder: it is on the server's disk."""

    transfer_id: str
    error: str = ""


ToWorker = (
    Train
    | Sample
    | Welcome
    | CancelSample
    | ChangeWeights
    | OwnModel
    | DropModel
    | DropSamplers
    | Stored
    | Ping
    | Stop
    | SendAdapter
    | AdapterPart
    | PlaceAdapter
    | DropAdapters
    | FileListing
    | FilePart
    | FileStored
)

# What a worker says


class Blame(StrEnum):
    USER = "user"
    SERVER = "server"


class EngineFailure(Struct, frozen=True, kw_only=True, tag="failure"):
    message: str
    blame: Blame


class Created(Struct, frozen=True, kw_only=True, tag="created"):
    pass


class DatumOutput(Struct, frozen=True, kw_only=True):
    logprobs: bytes
    """float32, little-endian."""
    shape: tuple[int, ...]
    entropies: bytes = b""
    """float32, one for each position, NaN where there was no gradient; empty unless it was trained with a loss of
    sampled tokens."""


class PassResult(Struct, frozen=True, kw_only=True, tag="pass_result"):
    outputs: list[DatumOutput]
    metrics: dict[str, float]


class StepDone(Struct, frozen=True, kw_only=True, tag="step_done"):
    metrics: dict[str, float]


class Saved(Struct, frozen=True, kw_only=True, tag="saved"):
    size_bytes: int


class SamplerKept(Struct, frozen=True, kw_only=True, tag="kept"):
    pass


class Loaded(Struct, frozen=True, kw_only=True, tag="loaded"):
    pass


TrainOutcome = Created | PassResult | StepDone | Saved | SamplerKept | Loaded | EngineFailure


class Trained(Struct, frozen=True, kw_only=True, tag="trained"):
    request_id: str
    model_id: str
    seq_id: int
    outcome: TrainOutcome
    compute_s: float = 0.0
    """Time the worker spent on it, its share of batches included."""


class Sampled(Struct, frozen=True, kw_only=True, tag="sampled"):
    request_id: str
    outcome: SampleResult | EngineFailure
    compute_s: float = 0.0
    weights: str = ""
    """Name of the kept sampler that it began with; empty for other weights."""


class StreamedTokens(Struct, frozen=True, kw_only=True, array_like=True):
    """New tokens of one sequence since the last message."""

    request_id: str
    sample: int
    tokens: list[int] = []
    logprobs: list[float] = []
    """What the result will say of them: raw ones where the request asked for those."""
    topk_logprobs: list[TopLogprobs] = []


class Streamed(Struct, frozen=True, kw_only=True, tag="streamed"):
    parts: list[StreamedTokens]


class ModelState(Struct, frozen=True, kw_only=True):
    model_id: str
    received_seq: int
    """Everything up to here is applied or queued in this worker."""
    applied_seq: int
    """Everything up to here is applied: its results are stored, or in `Hello.unstored`."""
    covered_seq: int
    """Everything up to here is in each of the snapshots on disk, or of their copies at the server if the worker is on
    another machine; -1 while there are not as many as are kept."""


UNQUANTISED = "unquantised"


class ModelCard(Struct, frozen=True, kw_only=True):
    """The base model this worker holds."""

    folder: str
    architecture: str
    hidden_size: int = 0
    """0 in what an older worker tells."""
    vocab_size: int
    max_positions: int
    parameters: int
    dtype: str
    weights: str = UNQUANTISED
    """What the weights of products are kept in: a form of 8 or 4 bits, or `unquantised`."""
    device: str
    eos_token_ids: tuple[int, ...] = ()
    lora_beyond_dense: tuple[str, ...] = ()
    """Which of `delta_nets`, `mambas` and `experts` adapters of this model train beside plain projections."""
    vision: VisionCard | None = None
    """How pictures are prepared for it; None: it reads text only."""


class ReplicaTicket(Struct, frozen=True, kw_only=True):
    """Allows a replica elsewhere to join: signed by the server, which has checked its key and its base model."""

    replica_id: str
    base_model: str
    signature: str
    key_id: int = 0
    """Number of the key that it joined with: it may stay as long as that is valid. 0: there was none."""


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    """Sent once a second until `Welcome`, and whenever the server has been silent for long."""

    pid: int
    worker_id: str
    """Made at process start, so that a restarted worker has another."""
    card: ModelCard
    models: list[ModelState]
    sampler_ids: list[str]
    unstored: list[Trained]
    """Results that the server has not confirmed with `Stored`."""
    snapshots: list[Snapshotted] = []
    """The newest snapshot of each model that has one."""
    spooled: list[SamplerSpooled] = []
    placed: list[str] = []
    """Digests of the adapters that a replica has."""
    ticket: ReplicaTicket | None = None
    """Ticket of a replica elsewhere."""
    life: str = ""
    """The life in the worker's configuration."""


class WorkerHeartbeat(Struct, frozen=True, kw_only=True, tag="beat"):
    """Sign of life, sent every few seconds by a separate thread of the worker, whatever its compute loop does."""

    pid: int
    worker_id: str = ""
    doing: str = ""
    """What the worker does; empty while it waits for messages."""
    busy_s: float = 0.0
    """How long the loop has been busy with it without progress."""


class Snapshotted(Struct, frozen=True, kw_only=True, tag="snapshotted"):
    model_id: str
    seq_id: int
    """Number of the last request that the snapshot covers."""
    covered_seq: int
    """As in `ModelState`."""
    file: str
    """Name of the snapshot's file in the worker's state folder. Whatever file it needs beside it was named by
    `SamplerSpooled` before."""


class SamplerSpooled(Struct, frozen=True, kw_only=True, tag="sampler_spooled"):
    """The weights of a kept sampler are on disk."""

    sampler_id: str
    file: str
    """Name of their file in the worker's state folder."""


class Stats(Struct, frozen=True, kw_only=True, tag="stats"):
    """Statistics of a worker, sent once a second while there is work, and once when it ends. Counts are since its
    start."""

    queued_train: int = 0
    running_samples: int = 0
    waiting_samples: int = 0
    models: int = 0
    adapter_bytes: int = 0
    kept_samplers: int = 0
    sampler_bytes: int = 0
    """Memory of kept samplers, without those on disk."""
    kv_used: float = 0.0
    """Share of the cache's pages in use."""
    cache_tokens: int = 0
    """Tokens that the cache can hold."""
    token_gap_p95_s: float = 0.0
    """Time from one token of a sample to its next, over the last steps, including everything that ran in between."""
    tokens_trained: int = 0
    tokens_sampled: int = 0
    train_s: float = 0.0
    sample_s: float = 0.0
    train_batches: int = 0
    train_batch_models: int = 0
    """Sum over batches of the models in each: divided by `train_batches`, how many share one."""
    sample_steps: int = 0
    sample_rows: int = 0
    optim_steps: int = 0
    snapshots: int = 0


class AdapterRefused(Struct, frozen=True, kw_only=True, tag="adapter_refused"):
    """The answer to `SendAdapter` if there is no such adapter."""

    transfer_id: str
    failure: EngineFailure


class GetAdapterPart(Struct, frozen=True, kw_only=True, tag="get_adapter_part"):
    """A replica asks for the next part of an adapter's file."""

    digest: str
    offset: int


class AdapterPlaced(Struct, frozen=True, kw_only=True, tag="adapter_placed"):
    """A replica can sample from an adapter now."""

    digest: str
    error: str = ""
    """Why it cannot."""


class Leaving(Struct, frozen=True, tag="leaving"):
    """A replica was asked to end: it finishes the samples it has, gets no more, and waits for `Stop`."""


class ListFiles(Struct, frozen=True, kw_only=True, tag="list_files"):
    """Asks for the files of a folder; empty: of the whole area."""

    area: FileArea
    folder: str = ""


class GetFilePart(Struct, frozen=True, kw_only=True, tag="get_file_part"):
    area: FileArea
    path: str
    offset: int


class KeepFolder(Struct, frozen=True, kw_only=True, tag="keep_folder"):
    """All files of a checkpoint are at the server: the folder takes its name. Answered by `FileStored`."""

    transfer_id: str
    folder: str


class DropFiles(Struct, frozen=True, kw_only=True, tag="drop_files"):
    """Copies in the area `state` that are not needed any more."""

    paths: list[str]


FileRequest = ListFiles | GetFilePart
"""What a worker may ask before its `Hello`."""

FromWorker = (
    Trained
    | Sampled
    | Streamed
    | Hello
    | WorkerHeartbeat
    | Snapshotted
    | SamplerSpooled
    | Stats
    | AdapterPart
    | AdapterRefused
    | GetAdapterPart
    | AdapterPlaced
    | Leaving
    | ListFiles
    | GetFilePart
    | FilePart
    | KeepFolder
    | DropFiles
)

PART_BYTES = 4 << 20
"""Size of an adapter's parts, without the last."""
PACKED_CONFIG = "palestra_adapter_config"
"""In the metadata of an adapter's file: its PEFT config."""

encode_message = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


PRELOAD = "PALESTRA_PRELOAD"
"""Variable with the number of a standby's process and a token: the worker loads its model and waits until that process
needs it."""
PRELOAD_GO = "preload-go"
"""File in the worker's state folder with the token of the worker that is to go on, and its `life`."""


class RanksMeeting(Struct, frozen=True, kw_only=True):
    """Where the ranks of a group on several machines meet. Rank 0 listens there."""

    host: str
    calls_port: int
    """Port for calls, which are encrypted."""
    store_port: int
    """Port for torch.distributed."""
    secret_key: str
    """CURVE key of rank 0. Followers derive its public key from it."""


class WorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a worker, passed to `python -m palestra.engine` as JSON in the variable PALESTRA_WORKER."""

    address: str
    """ZeroMQ endpoint where the server binds."""
    model: str
    """Folder of the base model."""
    base: str = ""
    """Its folder at the server, which checkpoints name, where the worker is on another machine; else empty."""
    state: str
    """Folder for snapshots and samplers on disk, used by this worker alone."""
    role: Literal["trainer", "sampler"] = "trainer"
    """trainer: trains, and samples from its own weights. sampler: a replica, which samples from adapters it is sent."""
    server_key: str | None = None
    """Public CURVE key of the server, which encrypts the link. None: the link is not encrypted, and stays on this
    machine."""
    client_key: str | None = None
    """Secret CURVE key by which the server knows this worker. None: any is admitted, and a ticket is shown."""
    life: str = ""
    """Made for each start by who starts it: what an earlier process says is not listened to."""
    is_remote: bool = False
    """It is on another machine than the server. `state` is relative to `node_folder`, and copied to the server;
    checkpoints come from there and go there; so does the base model, unless it is on this machine."""
    version: str = ""
    """Version of Palestra at the server: a remote worker's must be the same."""
    node_folder: str = ""
    """Folder for base models and states on the worker's machine; ~ is its user's home there."""
    fingerprint: str = ""
    """Digest of the base model, as `palestra.util.model_fingerprint` makes it: a remote worker's must be the same."""
    hub_id: str | None = None
    """Hugging Face id of the base model, for a cache on the worker's machine."""
    meeting: RanksMeeting | None = None
    """Where ranks on several machines meet. None: rank 0 starts the others itself."""
    snapshot_copy_s: float = 60.0
    """Seconds between copies of a model's snapshots to the server, for a remote worker."""
    ticket: ReplicaTicket | None = None
    """Ticket of a replica elsewhere."""
    device: str = "auto"
    """`auto`: a GPU if there is one."""
    devices: tuple[str, ...] = ()
    """Device of each rank, where the worker is a group of processes."""
    shard: int = 1
    """Ranks across which the base model lies."""
    tensor: int = 1
    """Neighbouring ranks that compute every layer together."""
    context: int = 1
    """Neighbouring ranks, or groups of `tensor` ranks, that compute every micro-batch together."""
    dtype: str | None = None
    weights: str | None = None
    """Form of 8 or 4 bits for the weights of products. None: the dtype."""
    allow_weights_mismatch: bool = False
    """Go on with models that were trained on weights in another form."""
    threads: int | None = None
    max_rank: int = 256
    max_models: int = 1024
    micro_batch_tokens: int | None = None
    """Tokens of a micro-batch. None: chosen by the model's size, so that one takes some tens of milliseconds."""
    checkpointing: Checkpointing = False
    share_prefixes: bool | None = None
    """None: yes, but for float32 on a GPU."""
    gradient_shards: int = 1
    """Sums of micro-batches of which a request's gradient is a binary tree. Fixed for the life of a state folder."""
    allow_shard_mismatch: bool = False
    """Go on with models that were trained with another number of gradient shards."""
    allow_tensor_mismatch: bool = False
    """Go on with models that were trained with another number of ranks that share every layer."""
    allow_context_mismatch: bool = False
    """Go on with models that were trained with another number of ranks that share every micro-batch."""
    sample_share: float = 0.5
    """Share of the time that sampling gets while there is training to do as well."""
    quantum_s: float = 0.03
    numerics: Literal["exact", "fast"] = "exact"
    max_sample_rows: int | None = None
    cache_tokens: int | None = None
    cache_share: float = 0.5
    sampler_memory_bytes: int = 1 << 30
    snapshot_every_s: float = 10.0
    snapshot_every_bytes: int = 64 << 20
    """Bytes of training requests after which a snapshot is made."""
    server_timeout_s: float = 30.0
    beat_every_s: float = 5.0
