"""What `palestra serve` can be told.

Owns: keys, defaults, bounds of the server's config; handing a worker its part. Never touches: the network, torch.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from palestra.config.base import Config, Folder
from palestra.config.bundled import bundled_model
from palestra.config.hub import find_in_cache, is_hub_id
from palestra.types.engine import WorkerConfig

Names = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    Field(min_length=1),
]


class ModelConfig(Config):
    """A base model, held by a worker process of its own. All but `path` and `name` is handed to that worker."""

    path: Folder
    """The model's folder; or a Hugging Face id, for its folder in the local cache; or the bundled `ephebe`."""
    name: Names = Field(default_factory=lambda data: [data["path"].name])
    """What clients may call it, the first one being its own name. Default: the folder's name, or the id."""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """None: as stored, where the device computes in it."""
    threads: PositiveInt | None = None
    """Of the CPU. None: torch decides."""
    max_rank: PositiveInt = 256
    micro_batch_tokens: PositiveInt | None = None
    """None: from the model's size, so that a quantum takes some tens of milliseconds."""
    checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    sample_share: float = Field(default=0.5, ge=0, le=1)
    """Of the time, while there is both training and sampling to do."""
    quantum_s: PositiveFloat = 0.03
    max_sample_rows: PositiveInt = 256
    cache_tokens: PositiveInt | None = None
    """Room for keys and values. None: from the memory there is."""
    sampler_memory_bytes: PositiveInt = 1 << 30
    """Of kept samplers; the least recently used ones beyond it spill to disk."""
    snapshot_every_s: PositiveFloat = 10.0
    snapshot_every_bytes: PositiveInt = 64 << 20
    """Of training requests."""
    server_timeout_s: PositiveFloat = 30.0
    """A worker that hears nothing from its server for so long exits."""

    @model_validator(mode="before")
    @classmethod
    def _look_in_the_cache(cls, given: Any) -> Any:
        path = given.get("path") if isinstance(given, dict) else None
        if not isinstance(path, str):
            return given
        if (folder := bundled_model(path)) is not None:
            return {"name": [path], **given, "path": folder}
        return {"name": [path], **given, "path": find_in_cache(path)} if is_hub_id(path) else given


class Limits(Config):
    max_body_bytes: PositiveInt = 256 << 20
    """Of one HTTP request, unpacked; beyond it 413."""
    max_pending_samples: PositiveInt = 20_000
    """Over all clients; beyond it 429, but for owners with less than an equal part. The benchmark has 10,000."""
    max_pending_train_bytes: PositiveInt = 1 << 30
    """Of training requests without a result, over all clients; beyond it 429, but for owners with less than an equal
    part."""
    max_models: PositiveInt = 1024
    """Trained models alive at once, for each base model."""
    max_conversations: PositiveInt = 10_000
    """Held in memory so that they go on token for token; the least recently used ones beyond it are let go."""
    max_conversation_tokens: PositiveInt = 64 << 20
    """Of all of them together: four bytes each."""
    max_turns: PositiveInt = 200_000
    """Of the model's answers kept in traces, for each owner; the oldest traces beyond it are deleted."""


class ServeConfig(Config):
    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    """0: any free one; the ready message says which."""
    state: Folder = Path(".palestra")
    """Everything that must survive: database, journal, snapshots, checkpoints. The default is a folder in the current
    directory: on a laptop each project then has its own state, easy to see, copy and delete, and two servers
    started in two places do not fight over one lock. A service names an absolute one."""
    database: str = Field(default_factory=lambda data: f"sqlite:///{data['state'] / 'palestra.db'}", min_length=1)
    """An SQLAlchemy URL, sqlite or postgresql. Default: SQLite in the state folder."""
    checkpoints: Folder = Field(default_factory=lambda data: data["state"] / "checkpoints")
    """Default: in the state folder."""
    models: list[ModelConfig] = Field(default=[])
    limits: Limits = Limits()
    keep_results_s: NonNegativeFloat = 3600.0
    """How long a finished future can be asked for again."""
    keep_runs_s: NonNegativeFloat = 30 * 86400.0
    """How long an ended session stays listed, if it has no checkpoint."""
    keep_deleted_s: NonNegativeFloat = 600.0
    """How long the files of a deleted checkpoint stay: somebody may be reading them. Longer, if a crash would need
    them again."""
    keep_conversations_s: NonNegativeFloat = 86400.0
    """How long a conversation can pause and still go on token for token."""
    keep_traces_s: NonNegativeFloat = 7 * 86400.0
    """How long a trace stays after its last answer."""
    session_timeout_s: float = 300.0
    """Without a heartbeat for so long a session ends and its models are freed. Negative: never."""
    session_check_s: float = 30.0
    """How often to look for such sessions. Negative: never."""
    gap_wait_s: NonNegativeFloat = 30.0
    """A missing number before other passes is given up when nothing has come for so long. Long enough for the first
    chunk of a call, which is sent last, to arrive over a slow line."""
    poll_hold_s: NonNegativeFloat = 25.0
    """How long a poll for a result waits before it answers "not yet"."""
    worker_start_s: NonNegativeFloat = 600.0
    """A worker that is not ready by then, with its model and snapshots loaded, is ended and started again. 0: never."""
    worker_silence_s: NonNegativeFloat = 30.0
    """A worker without a sign of life for so long is ended and started again. 0: never."""
    worker_stall_s: NonNegativeFloat = 600.0
    """The same for one that lives but is stuck in one computation: far more than the longest micro-batch. 0: never."""
    require_key: Literal["auto", "always"] = "auto"
    """auto: not on a loopback address without keys, where everyone is one owner and any key is accepted."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False
    """JSON lines instead of text on stderr."""
    otlp_endpoint: str | None = None
    """Where to send traces, as http://host:4318. None: nowhere."""

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def cleans_sessions(self) -> bool:
        return self.session_timeout_s >= 0 and self.session_check_s >= 0

    @model_validator(mode="after")
    def _names_are_unique(self) -> ServeConfig:
        counts = Counter(name for model in self.models for name in set(model.name))
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"two models are served as {twice[0]!r}; give one of them another name (models[].name)")
        return self


BEATS_IN_SILENCE = 6  # a few may be late
MAX_BEAT_S = 5.0


def worker_config(serve: ServeConfig, model: ModelConfig, address: str, state: Path) -> WorkerConfig:
    """`address`: the ZeroMQ endpoint the server binds. `state`: a folder for this worker alone."""
    fields: dict[str, Any] = {
        **model.model_dump(exclude={"path", "name"}),
        "address": address,
        "model": str(model.path),
        "state": str(state),
        "max_models": serve.limits.max_models,
        "beat_every_s": min(MAX_BEAT_S, serve.worker_silence_s / BEATS_IN_SILENCE or MAX_BEAT_S),
    }
    return msgspec.convert(fields, WorkerConfig)
