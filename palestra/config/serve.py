"""The config of `palestra serve`."""

from __future__ import annotations

import ipaddress
import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from palestra.config.base import Config, File, Folder
from palestra.config.bundled import EPHEBE, bundled_model
from palestra.config.load import Layers, Override, merge_layers, validate
from palestra.config.redaction import check_pattern
from palestra.types.engine import WorkerConfig
from palestra.types.gym import GYM_HEAD
from palestra.util.hugging_face import find_in_cache, is_hub_id
from palestra.util.json_types import JsonObject

Names = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    Field(min_length=1),
]


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"{text!r} is not an address; write it as http://host:port")
    return text.rstrip("/").removesuffix("/v1")


def _network(text: str) -> str:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        raise ValueError(f"{text!r} is not an address or a network; write it as 10.0.0.7 or 10.0.0.0/24") from None
    return text


def _power_of_two(number: int) -> int:
    if number & (number - 1):
        raise ValueError(
            f"{number} is not a power of two; try {1 << number.bit_length() - 1} or {1 << number.bit_length()}"
        )
    return number


def _ray(given: object) -> object:
    return {"address": given} if isinstance(given, str) else given


def _replicas(given: object) -> object:
    return {"count": given} if isinstance(given, int) and not isinstance(given, bool) else given


def _pattern(text: str) -> str:
    return check_pattern(text).pattern


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class VllmConfig(Config):
    """vLLM as the sampler of a model: servers that run already, or that Palestra starts. See docs/distributed.md."""

    urls: list[Annotated[str, AfterValidator(_url)]] = Field(default=[])
    """Addresses of servers that run already, with the flags they need."""
    python: File | None = None
    """The interpreter of an environment with vLLM, such as .venv-vllm/bin/python after `make vllm`; servers are started
    with it."""
    replicas: PositiveInt = 1
    """Number of servers to start."""
    devices: list[str] = Field(default=[])
    """CUDA_VISIBLE_DEVICES of each server that is started. Empty: unchanged."""
    args: list[str] = Field(default=[])
    """More flags of vLLM for the servers that are started, such as --gpu-memory-utilization=0.5."""
    api_key: str | None = None
    """API key for the servers at `urls`. None: the value of VLLM_API_KEY."""
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 32
    """Highest LoRA rank that models may have. For servers at `urls`, the value they were started with."""
    max_loras: PositiveInt = 4
    """Maximum number of adapters in one batch of a server that is started."""
    max_adapters: PositiveInt = 64
    """Adapters loaded at each server. Beyond it, the least recently used ones are unloaded and loaded again on use."""
    max_in_flight: PositiveInt = 512
    """Maximum number of requests at each server; more wait here."""
    start_s: PositiveFloat = 600.0
    """Time limit for a server to start and answer."""
    trial_s: PositiveFloat = 120.0
    """Time limit of each of the first samples, which test a new server; a slower server is given up."""
    wait_s: PositiveFloat = 300.0
    """How long a sample waits while no server answers or all are busy, before it fails."""
    request_s: PositiveFloat = 3600.0
    """The longest a request to vLLM may take."""

    @model_validator(mode="after")
    def _fits(self) -> VllmConfig:
        if self.urls and self.python is not None:
            raise ValueError("give either urls, for servers that run already, or python, to start them")
        if self.devices and len(self.devices) != self.replicas:
            raise ValueError(f"devices has {len(self.devices)} entries for {self.replicas} replicas")
        return self


PowerOfTwo = Annotated[PositiveInt, AfterValidator(_power_of_two)]


class ParallelConfig(Config):
    """How the processes of one worker divide its work. See docs/distributed.md."""

    data: PowerOfTwo | None = None
    """Ranks, or groups of `tensor` × `context` ranks, that compute micro-batches at the same time. None: as many as
    `gpus` has room for."""
    shard: PowerOfTwo = 1
    """Ranks across which the layers of the base model lie, so that each holds a part; it divides `data` × `context`. A
    layer is gathered before it computes."""
    tensor: PowerOfTwo = 1
    """Ranks that compute every layer together, for sampling and for training: each holds and computes its part of the
    heads and of the feed-forward networks. Fixed for the life of a state folder."""
    context: PowerOfTwo = 1
    """Ranks, or groups of `tensor` ranks, that compute every micro-batch together in training: each has a part of the
    rows, so that a sequence may be so much longer, and in attention a part of the heads. `data` × `context` × `tensor`
    is the number of ranks. Fixed for the life of a state folder."""

    @property
    def members(self) -> int:
        """Ranks that compute the same micro-batches."""
        return self.tensor * self.context

    @property
    def shape(self) -> str:
        """What the number of ranks is the product of."""
        used = (name for name in ("context", "tensor") if getattr(self, name) > 1)
        return " × ".join(("parallel.data", *(f"parallel.{name}" for name in used)))


class ReplicasConfig(Config):
    """Processes of Palestra's own engine that only sample, from adapters they are sent. See docs/distributed.md."""

    count: int = Field(default=0, ge=0)
    """Number of processes to start on this machine. More may join with `palestra replica`."""
    devices: list[str] = Field(default=[])
    """Device of each process that is started: cpu, cuda:1 … Empty: the model's."""
    max_adapters: PositiveInt = 64
    """Adapters at each replica. Beyond it, the least recently used ones are dropped and sent again on use."""
    max_in_flight: PositiveInt = 512
    """Maximum number of requests at each replica; more wait at the server."""
    wait_s: PositiveFloat = 300.0
    """How long a sample waits while there is no replica, before it fails."""

    @model_validator(mode="after")
    def _fits(self) -> ReplicasConfig:
        if self.devices and len(self.devices) != self.count:
            raise ValueError(f"devices has {len(self.devices)} entries for {self.count} replicas")
        return self


class RayConfig(Config):
    """A Ray cluster on whose nodes workers and replicas run. This machine is one of them. See docs/distributed.md."""

    address: str = Field(default="auto", min_length=1)
    """Address of the cluster's head, as host:port; auto: RAY_ADDRESS, or the cluster of this machine."""
    host: str | None = Field(default=None, min_length=1)
    """Address of this machine at which workers reach the server. None: the one that it has in the cluster."""
    node_folder: str = Field(default="~/.cache/palestra", min_length=1)
    """Folder for base models and states on each node; ~ is the home of the user there."""
    wait_s: NonNegativeFloat = 120.0
    """How long a worker waits for nodes with room for it, before an error says what is missing."""
    resources: dict[str, NonNegativeFloat] = Field(default={})
    """Resources in Ray's words that each process asks for, such as {GPU: 0.5} or {fast_disk: 1}, beside one CPU for
    each of its threads and, on a GPU, one GPU."""


class ModelConfig(Config):
    """A base model and the settings of its worker process."""

    path: Folder
    """The model's folder; or a Hugging Face id, for its folder in the local cache; or the bundled `ephebe`."""
    name: Names = Field(default_factory=lambda data: [data["path"].name])
    """Names of the model for clients; the first is its main name. Default: the folder's name, or the id."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto: a GPU if there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights. None: as stored, if the device supports it, else float32."""
    weights: Literal["bf16", "fp8", "int8", "int4", "nf4", "mxfp4"] | None = None
    """What the frozen weights of matrix products are kept in: 8 bits (fp8, int8), 4 bits (int4, nf4, mxfp4), or the
    dtype bfloat16 (bf16). Adapters, embeddings and norms have the dtype in any case. None: the dtype."""
    allow_weights_mismatch: bool = False
    """Go on with checkpoints and models that were trained on weights in another form."""
    threads: PositiveInt | None = None
    """CPU threads to compute with. None: torch decides."""
    max_rank: PositiveInt = 256
    """The highest LoRA rank that a client may ask for."""
    micro_batch_tokens: PositiveInt | None = None
    """Tokens of a micro-batch. None: chosen by the model's size, so that one takes some tens of milliseconds."""
    checkpointing: bool | Literal["offload"] = False
    """Recompute activations in the backward pass, which takes less memory and more time. offload: what layers keep for
    that waits in the host's memory; on a CPU it is as true."""
    share_prefixes: bool | None = None
    """Compute tokens that several data of a training request begin with once, forward and backward. None: yes,
    but for what has no attention kernels on a GPU, such as float32."""
    gpus: PositiveInt | Annotated[list[str], Field(min_length=1)] | None = None
    """GPUs of this worker: a number, or a list of devices such as [cuda:2, cuda:3]. None: `device` alone."""
    parallel: ParallelConfig = ParallelConfig()
    gradient_shards: PowerOfTwo = 1
    """Sums of micro-batches of which a request's gradient is a binary tree, a power of two. With equal gradient shards
    training ends at the same bits on any number of GPUs up to it. Fixed for the life of a state folder."""
    allow_shard_mismatch: bool = False
    """Go on with models that were trained with another number of gradient shards; their last bits will differ."""
    allow_tensor_mismatch: bool = False
    """Go on with models that were trained with another `parallel.tensor`; their last bits will differ."""
    allow_context_mismatch: bool = False
    """Go on with models that were trained with another `parallel.context`; their last bits will differ."""
    sample_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the time that sampling gets while there is training to do as well."""
    quantum_s: PositiveFloat = 0.03
    """How long the worker samples before it checks whether it is training's turn."""
    numerics: Literal["exact", "fast"] = "exact"
    """How a GPU adds up matrix products. exact: a row's bits depend on that row alone, so sampler and trainer agree to
    the bit and a seeded request gives the same tokens in any batch. fast: cuBLAS may split long sums in any way."""
    max_sample_rows: PositiveInt | None = None
    """Sequences of one sampling step; more wait. None: 256 on a CPU, 512 on a GPU."""
    cache_tokens: PositiveInt | None = None
    """Size of the KV cache in tokens. None: as many as fit into `cache_share` of a GPU's memory, or into 512 MiB on a
    CPU."""
    cache_share: float = Field(default=0.5, gt=0, lt=1)
    """Share of the GPU memory left beside the weights that the KV cache gets; the rest is for training."""
    sampler_memory_bytes: PositiveInt = 1 << 30
    """Memory of the sampler cache; beyond it, the least recently used samplers go to disk."""
    snapshot_every_s: PositiveFloat = 10.0
    """Seconds between snapshots of models in training: the most work that a crash repeats. Longer where writing one
    takes more than a quarter of it."""
    snapshot_every_bytes: PositiveInt = 64 << 20
    """Bytes of training requests after which a snapshot is made sooner; not before four times as long as writing the
    last one took."""
    snapshot_copy_s: PositiveFloat = 60.0
    """Seconds between copies of a model's snapshots to the server, if the worker is on another machine (`ray`): the
    most work that the loss of that machine repeats."""
    server_timeout_s: PositiveFloat = 30.0
    """A worker that hears nothing from its server for this time exits."""
    tool_format: str | None = None
    """Format of the model's tool calls: deepseek, gemma4, glm, harmony, hermes, kimi, llama3_json, mistral, qwen_xml or
    module:attribute. None: detected from its chat template."""
    sampler: Literal["torch", "vllm"] = "torch"
    """torch: the worker trains and samples. vllm: the worker trains, and vLLM samples."""
    vllm: VllmConfig = VllmConfig()
    replicas: Annotated[ReplicasConfig | None, BeforeValidator(_replicas)] = None
    """Sampler replicas: a number of processes to start here, or their settings. With them the worker only trains. 0:
    all replicas join from elsewhere. None: the worker trains and samples."""

    @model_validator(mode="after")
    def _has_its_sampler(self) -> ModelConfig:
        if self.sampler == "vllm" and self.replicas is not None:
            raise ValueError("replicas are for sampler=torch; the number of vLLM servers is vllm.replicas")
        if self.sampler == "vllm" and not self.vllm.urls and self.vllm.python is None:
            raise ValueError(
                "sampler=vllm needs the addresses of running servers (vllm.urls), or the Python that has "
                "vLLM (vllm.python=.venv-vllm/bin/python, after make vllm)"
            )
        if self.sampler == "vllm" and self.weights not in (None, "bf16"):
            raise ValueError(
                f"sampler=vllm samples from the unquantised weights, but weights is {self.weights}; "
                "set sampler=torch, or leave weights out"
            )
        if self.sampler != "vllm" and self.vllm != VllmConfig():
            raise ValueError(f"there are settings for vllm, but sampler is {self.sampler}; set sampler=vllm")
        return self

    @property
    def devices(self) -> tuple[str, ...]:
        """Device of each rank."""
        if isinstance(self.gpus, list):
            return tuple(self.gpus)
        if self.gpus is not None:
            return tuple(f"cuda:{number}" for number in range(self.gpus))
        return (self.device,) * ((self.parallel.data or 1) * self.parallel.members)

    @model_validator(mode="after")
    def _has_its_ranks(self) -> ModelConfig:
        parallel, ranks = self.parallel, len(self.devices)
        data, tensor, members = parallel.data, parallel.tensor, parallel.members
        if data is not None and self.gpus is not None and data * members != ranks:
            raise ValueError(
                f"{parallel.shape} is {data * members}, but gpus has {ranks}; make them equal"
                + (", or leave one out" if members == 1 else "")
            )
        if ranks > 1 and self.gpus is None and self.device != "cpu":
            raise ValueError(f"{parallel.shape} is {ranks}; set gpus={ranks} as well, or device=cpu")
        _power_of_two(ranks)
        for name in ("tensor", "context", "shard"):
            if ranks % (number := getattr(parallel, name)):
                raise ValueError(f"parallel.{name} is {number}, but there are only {ranks} ranks to divide among")
        if ranks % members:
            raise ValueError(
                f"parallel.context × parallel.tensor is {members}, but there are only {ranks} ranks to divide among"
            )
        if tensor > 1 and parallel.shard > 1:
            raise ValueError("parallel.tensor and parallel.shard cannot be combined yet; leave one of them out")
        for name, number in (("shard", self.parallel.shard), ("tensor", tensor)):
            if number > 1 and self.weights not in (None, "bf16"):
                raise ValueError(
                    f"parallel.{name} is {number}, but {self.weights} weights cannot be divided; leave one of them out"
                )
        if (groups := ranks // members) > self.gradient_shards:
            raise ValueError(
                f"{groups} ranks need {groups} gradient shards, and there are {self.gradient_shards}; "
                f"set gradient_shards={max(8, groups)}, which is fixed for the life of the state folder"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _look_in_the_cache(cls, given: Any) -> Any:
        path = given.get("path") if isinstance(given, dict) else None
        if not isinstance(path, str):
            return given
        if (folder := bundled_model(path)) is not None:
            return {"name": [path], **given, "path": folder}
        return {"name": [path], **given, "path": find_in_cache(path)} if is_hub_id(path) else given


class ServeLimits(Config):
    """Bounds on what clients may send and keep."""

    max_body_bytes: PositiveInt = 256 << 20
    """Largest body of an HTTP request, unpacked; beyond it 413."""
    head_timeout_s: PositiveFloat = 20.0
    """How long the head of a request may take, from its first byte to its last; then 408."""
    max_pending_samples: PositiveInt = 20_000
    """Pending samples of all clients; beyond it 429, except for owners with less than an equal share. Each takes some
    2 kB of memory, and its prompt once; benchmarks/load.py has 131,072."""
    max_pending_train_bytes: PositiveInt = 1 << 30
    """Size of all training requests without a result; beyond it 429, except for owners with less than an equal
    share."""
    max_models: PositiveInt = 1024
    """Trained models alive at once, for each base model."""
    max_adapter_bytes: PositiveInt = 16 << 30
    """Size of the adapters kept on disk for replicas; the least recently used ones beyond it are deleted, and asked for
    again from the worker that trains them."""
    max_checkpoint_cache_bytes: PositiveInt = 64 << 30
    """Size of the checkpoints that are kept on this disk where `checkpoints` is a URL; the least recently used ones
    beyond it are deleted here, and fetched again when they are needed."""
    max_routing_bytes: PositiveInt = 1 << 30
    """Size of the records of experts that sampled sequences visited (replay_routing); the oldest beyond it are
    dropped."""
    max_pictures: PositiveInt = 1024
    """Pictures of a request; beyond it 400. Equal files count once. Tinker's SDK sends up to 1,024 data at once."""
    max_picture_bytes: PositiveInt = 20 << 20
    """Size of a picture's file; beyond it 400."""
    max_picture_pixels: PositiveInt = 64_000_000
    """Pixels of a picture before it is resized, by its header; beyond it 400, before it is unpacked."""
    max_request_pixels: PositiveInt = 128_000_000
    """Pixels of all pictures of a request as the model reads them, at three bytes each; beyond it 400."""
    max_pending_picture_bytes: PositiveInt = 1 << 30
    """Size of the pictures of all pending samples; beyond it 429, except for owners with less than an equal share."""
    max_kept_picture_bytes: PositiveInt = 4 << 30
    """Size of the pictures of conversations that are kept in the state folder for traces; the least recently used ones
    beyond it are deleted."""
    max_conversations: PositiveInt = 10_000
    """Conversations in memory; beyond it, the least recently used ones of the owner who has the most are dropped."""
    max_conversation_tokens: PositiveInt = 64 << 20
    """Tokens of all conversations in memory together, at four bytes each."""
    max_turns: PositiveInt = 200_000
    """Answers of the model kept in traces, for each owner; the oldest traces beyond it are deleted."""


class EpisodesConfig(Config):
    """Settings of the broker at which episodes are registered, played and read back. See docs/episodes.md."""

    min_lease_s: PositiveFloat = 1.0
    """The shortest lease; a request for a shorter one gets this one."""
    max_lease_s: PositiveFloat = 3600.0
    """The longest lease; a request for a longer one gets this one."""
    max_wait_s: NonNegativeFloat = 60.0
    """How long a claim may wait for the first episode, and a reader for the first result."""
    hold_calls_s: NonNegativeFloat = 60.0
    """How long a model call waits while its run is paused; then 503, and the SDK comes back."""
    max_task_bytes: PositiveInt = 1 << 20
    """The largest task of an episode, as JSON."""
    max_result_bytes: PositiveInt = 1 << 20
    """The largest result of an episode, as JSON."""
    max_leases: PositiveInt = 4096
    """Open leases of each client; beyond it 429."""
    max_waiting: PositiveInt = 10_000
    """Waiting claims of all clients; further claims get an empty answer at once."""
    max_claims_per_s: PositiveFloat | None = None
    """Claims per second of each client; beyond it 429. None: any number."""
    max_calls_waiting: PositiveInt | None = 512
    """Waiting model calls at an engine. With more, claims for runs that sample from that engine get nothing until there
    are fewer. None: no such limit."""
    max_runs: PositiveInt = 1024
    """Runs that each owner may have."""
    keep_ended_s: NonNegativeFloat = 7 * 86400.0
    """How long an episode is remembered after its trainer committed it, so that a late end request gets the right
    answer."""
    url: Annotated[str, AfterValidator(_url)] | None = None
    """Address at which players reach this server, as http://host:port. None: the one they used for their claim."""
    mask: list[Annotated[str, AfterValidator(_pattern)]] = Field(default=[])
    """Regular expressions: what they match is blacked out in timelines and exports of episodes, as keys always are."""
    push_hosts: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Machines whose trainers may have results pushed to them over ZeroMQ, by name or address as they say it. This
    machine always may."""

    @model_validator(mode="after")
    def _has_room(self) -> EpisodesConfig:
        if self.min_lease_s > self.max_lease_s:
            raise ValueError("min_lease_s is more than max_lease_s")
        return self


class TinkerScriptConfig(Config):
    """A second port for AgentJet's clients, which look for TinkerScript at a port of its own. See
    docs/compatibility.md."""

    enabled: bool = False
    """Listen at the second port, too. The server's own port answers TinkerScript's calls in any case."""
    host: str | None = Field(default=None, min_length=1)
    """Address to listen on. None: the server's."""
    port: int = Field(default=10086, ge=0, le=65535)
    """Port to listen on. 0: any free one; the ready message says which."""


def _known_database(url: str) -> str:
    kind = url.partition(":")[0].partition("+")[0]
    if kind not in ("sqlite", "postgresql", "postgres"):
        raise ValueError(f"unknown kind of database {kind!r}; there are: sqlite, postgresql")
    return url


def _is_storage_url(url: str) -> str:
    if "://" not in url:
        raise ValueError(f"{url!r} is not a URL; try s3://bucket/folder or file:///folder")
    return url


StorageUrl = Annotated[str, AfterValidator(_is_storage_url)]
DatabaseUrl = Annotated[str, AfterValidator(_known_database)]


class ServeConfig(Config):
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on. Beyond loopback, keys are needed."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on. 0: any free one; the ready message says which."""
    tls_cert: File | None = None
    """PEM file with the certificate of this server and those that lead to its authority: it then speaks TLS at all of
    its HTTP ports. None: plain HTTP."""
    tls_key: File | None = None
    """PEM file with the private key, without a password. None: it is in `tls_cert`."""
    public_url: Annotated[str, AfterValidator(_url)] | None = None
    """Address by which clients reach this server through a proxy, such as https://palestra.example. Keys are then
    needed, also if the server itself listens on loopback. None: there is no proxy."""
    trusted_proxies: list[Annotated[str, AfterValidator(_network)]] = Field(default=["127.0.0.1", "::1"])
    """Addresses or networks of proxies. Only from them the headers X-Forwarded-For and X-Forwarded-Proto count."""
    picture_hosts: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Hosts from which pictures may be fetched that requests name by http(s) URLs, each with its port where that is not
    the usual one. Redirects are not followed. Other URLs than these and data: URLs are refused."""
    state: Folder = Path(".palestra")
    """Everything that must survive: database, journal, snapshots, checkpoints. The default is a folder in the current
    directory: on a laptop each project then has its own state, easy to see, copy and delete, and two servers
    started in two places do not fight over one lock. A service names an absolute one."""
    database: DatabaseUrl = Field(default_factory=lambda data: f"sqlite:///{data['state'] / 'palestra.db'}")
    """An SQLAlchemy URL, sqlite or postgresql. Default: SQLite in the state folder."""
    journal: Literal["files", "database"] = "files"
    """Where training requests and results are kept until snapshots cover them: in files of the state folder, or in the
    database, so that a standby on another machine can go on with them. If it changes, the records move at the next
    start."""
    snapshots: StorageUrl | None = None
    """Where the snapshots of models in training are copied to (s3://bucket/folder, file:///shared/folder), so that a
    standby on another machine can go on with them. None: they are in the state folder only."""
    checkpoints: StorageUrl | Folder = Field(
        default_factory=lambda data: data["state"] / "checkpoints", union_mode="left_to_right"
    )
    """Folder of the checkpoints, or where they are stored (s3://bucket/folder); then the state folder has a cache of
    them. Default: in the state folder."""
    archive: StorageUrl | None = None
    """Where traces go that are too old or too many for the database, as compressed lines of JSON (s3://bucket/folder).
    None: they are deleted."""
    standby: bool = False
    """Wait while another server uses the database, and take over when it is gone. Until then /readyz answers 503."""
    preload: bool = True
    """Whether a standby loads its models while it waits, so that it takes over at once. It needs the memory for it: set
    it to false for a standby on the active server's own GPU."""
    runs: Folder = Path("runs")
    """Folder of the training runs that the dashboard at /ui shows, to keys with the right `admin`."""
    gym: Annotated[str, AfterValidator(_url)] = GYM_HEAD
    """Address of the head server of the gym that the dashboard at /ui shows, to keys with the right `admin`."""
    models: list[ModelConfig] = Field(default=[])
    """The base models to serve. Empty: the bundled `ephebe`."""
    limits: ServeLimits = ServeLimits()
    episodes: EpisodesConfig = EpisodesConfig()
    tinkerscript: TinkerScriptConfig = TinkerScriptConfig()
    keep_results_s: NonNegativeFloat = 3600.0
    """How long the result of a finished future can be read again."""
    keep_runs_s: NonNegativeFloat = 30 * 86400.0
    """How long an ended session stays listed, if it has no checkpoint."""
    keep_deleted_s: NonNegativeFloat = 600.0
    """How long the files of a deleted checkpoint stay, because a client may be reading them. Longer, if they would be
    needed after a crash."""
    keep_conversations_s: NonNegativeFloat = 86400.0
    """How long a conversation stays in memory while nothing is added to it. Later it is found in its trace."""
    keep_traces_s: NonNegativeFloat = 7 * 86400.0
    """How long a trace stays after its last answer."""
    history: Literal["exact", "template"] = "exact"
    """For chats that do not set it: exact keeps the tokens that were read and sampled before; with template, the chat
    template renders the whole history again."""
    hosted_tools: Literal["leave_out", "refuse"] = "leave_out"
    """What becomes of tools that a vendor would run, such as a web search: left out of the prompt, which a header and
    the trace say, or the request is refused."""
    tool_namespaces: Literal["flatten", "leave_out"] = "flatten"
    """What becomes of tools in a namespace of OpenAI's: each is shown as namespace__name, or all are left out."""
    session_timeout_s: float = 300.0
    """A session ends after this time without a heartbeat, and its models are freed. Negative: never."""
    session_check_s: float = 30.0
    """How often expired sessions are searched for. Negative: never."""
    gap_wait_s: NonNegativeFloat = 30.0
    """A missing request number is given up after this time without any request. The default is long enough for the
    first chunk of a call, which is sent last, to arrive over a slow connection."""
    poll_hold_s: NonNegativeFloat = 25.0
    """How long a poll for a result waits before it answers "not yet"."""
    write_wait_s: NonNegativeFloat = 120.0
    """While nothing can be written (a full disk, a database that cannot be reached), clients are asked to retry for
    this time; then their requests are refused with the reason. The same holds for requests that wait for an engine
    which cannot be started because of that."""
    worker_start_s: NonNegativeFloat = 600.0
    """A worker that is not ready after this time, with its model and snapshots loaded, is ended and restarted. 0:
    never."""
    worker_silence_s: NonNegativeFloat = 30.0
    """A worker without a heartbeat for this time is ended and restarted. 0: never."""
    worker_stall_s: NonNegativeFloat = 600.0
    """A worker that is stuck in one computation for this time is ended and restarted. The default is far more than the
    longest micro-batch takes. 0: never."""
    replica_port: int | None = Field(default=None, ge=1, le=65535)
    """TCP port at which sampler replicas elsewhere join, encrypted. None: none can. See docs/distributed.md."""
    replica_host: str | None = Field(default=None, min_length=1)
    """Address of that port. None: the server's."""
    ray: Annotated[RayConfig | None, BeforeValidator(_ray)] = None
    """Run workers and replicas on the nodes of a Ray cluster: its address, `auto`, or its settings. None: they run on
    this machine."""
    require_key: Literal["auto", "always"] = "auto"
    """auto: not on a loopback address without keys, where everyone is one owner and any key is accepted."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of log lines; `debug` has one line for each request."""
    log_json: bool = False
    """Write JSON lines instead of text to stderr."""
    otlp_endpoint: str | None = None
    """Address to which traces are sent, such as http://host:4318. None: no traces."""

    @property
    def tinkerscript_host(self) -> str | None:
        """The address of the second port; None: there is none."""
        return (self.tinkerscript.host or self.host) if self.tinkerscript.enabled else None

    @property
    def database_file(self) -> Path | None:
        """The file of SQLite; None if the database is a server."""
        return Path(self.database.partition(":///")[2]) if self.database.startswith("sqlite") else None

    @property
    def checkpoint_folder(self) -> Path:
        """The folder on this disk that has the checkpoints, or a cache of them."""
        return self.checkpoints if isinstance(self.checkpoints, Path) else self.state / "checkpoints"

    @property
    def checkpoint_url(self) -> str | None:
        """The URL where checkpoints are stored; None if that is a folder."""
        return self.checkpoints if isinstance(self.checkpoints, str) else None

    @property
    def is_loopback(self) -> bool:
        """Whether all addresses that it listens on are loopback, and no proxy makes it known beyond."""
        if self.public_url is not None:
            return False
        return _is_loopback(self.host) and (self.tinkerscript_host is None or _is_loopback(self.tinkerscript_host))

    @property
    def cleans_sessions(self) -> bool:
        return self.session_timeout_s >= 0 and self.session_check_s >= 0

    @model_validator(mode="after")
    def _snapshots_are_here(self) -> ServeConfig:
        if self.ray is not None and self.snapshots is not None:
            raise ValueError(
                "snapshots=URL works with workers on the server's own machine only; with ray, snapshots are copied to "
                "the server's state folder: leave snapshots out, and give a standby that folder"
            )
        return self

    @model_validator(mode="after")
    def _storage_has_folders_of_its_own(self) -> ServeConfig:
        """What one of them does not know, it deletes as an orphan."""
        given = {"snapshots": self.snapshots, "checkpoints": self.checkpoint_url, "archive": self.archive}
        urls = {name: url.rstrip("/") + "/" for name, url in given.items() if url is not None}
        for (one, url), (other, beside) in itertools.permutations(urls.items(), 2):
            if beside.startswith(url):
                raise ValueError(f"{other} ({beside}) is inside of {one} ({url}); give each a folder of its own")
        return self

    @model_validator(mode="after")
    def _key_has_certificate(self) -> ServeConfig:
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key is given without tls_cert")
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> ServeConfig:
        counts = Counter(name for model in self.models for name in set(model.name))
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"two models are served as {twice[0]!r}; give one of them another name (models[].name)")
        return self


def load_serve_config(files: Iterable[str | Path], overrides: Iterable[str | Override]) -> ServeConfig:
    """Loads the config; later values win. If no model is named, the bundled one is served. Raises ConfigError."""
    layers = Layers()
    layers.merge({"models": [{"path": EPHEBE}]}, "the bundled model")
    return validate(ServeConfig, merge_layers(layers, files, overrides))


BEATS_IN_SILENCE = 6  # a few may be late
MAX_BEAT_S = 5.0


def worker_config(serve: ServeConfig, model: ModelConfig, address: str, state: Path) -> WorkerConfig:
    """`address` is the ZeroMQ endpoint that the server binds, `state` a folder for this worker alone."""
    fields: JsonObject = {
        **model.model_dump(exclude={"path", "name", "tool_format", "sampler", "vllm", "gpus", "parallel", "replicas"}),
        "device": model.devices[0],
        "shard": model.parallel.shard,
        "tensor": model.parallel.tensor,
        "context": model.parallel.context,
        "devices": model.devices if len(model.devices) > 1 else (),
        "address": address,
        "model": str(model.path),
        "state": str(state),
        "max_models": serve.limits.max_models,
        "beat_every_s": min(MAX_BEAT_S, serve.worker_silence_s / BEATS_IN_SILENCE or MAX_BEAT_S),
    }
    if (model.sampler != "torch" or model.replicas is not None) and model.cache_tokens is None:
        fields["cache_tokens"] = 1  # it never samples
    return msgspec.convert(fields, WorkerConfig)


def replica_config(serve: ServeConfig, model: ModelConfig, number: int, address: str, state: Path) -> WorkerConfig:
    """The same for a replica on this machine."""
    assert model.replicas is not None
    config = worker_config(serve, model, address, state)
    device = model.replicas.devices[number] if model.replicas.devices else model.devices[0]
    alone = {"devices": (), "shard": 1, "tensor": 1, "context": 1, "cache_tokens": model.cache_tokens}
    return msgspec.structs.replace(config, role="sampler", device=device, **alone)
