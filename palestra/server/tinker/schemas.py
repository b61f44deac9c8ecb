"""JSON bodies of the Tinker API, as frozen models: sessions, training, sampling, futures.

Unknown fields pass (newer SDKs send some); a wrong type does not.

Bodies of passes and samples are in `schemas_data`, those of the REST calls in `schemas_rest`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from palestra.util.json_types import JsonObject

MAX_METADATA_CHARS = 64 << 10
INT32, INT64 = 2**31 - 1, 2**63 - 1

Storable = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
"""Text without NUL and (because of the pattern) without a lone surrogate: databases refuse them."""
Id = Annotated[Storable, StringConstraints(min_length=1, max_length=256)]
Name = Id
Text = Annotated[Storable, StringConstraints(max_length=4096)]
Seq = Annotated[int, Field(ge=0, le=INT64)]
TrainSeq = Annotated[int, Field(ge=1, le=INT64)]
"""Number 0 is the model's creation."""
Ttl = Annotated[int, Field(ge=1, le=10 * 366 * 86400)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def _flat_metadata(value: object) -> Any:
    """Converts values to text (the REST objects show nothing else) and limits the total size."""
    if not isinstance(value, dict):
        return value
    try:
        flat = {k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in value.items()}
    except RecursionError:
        raise ValueError("metadata is nested too deeply") from None
    if sum(len(str(k)) + len(v) for k, v in flat.items()) > MAX_METADATA_CHARS:
        raise ValueError(f"metadata is longer than {MAX_METADATA_CHARS} characters")
    return flat


Metadata = Annotated[dict[Storable, Storable], BeforeValidator(_flat_metadata)]


class WireModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, protected_namespaces=())


class ErrorResponse(WireModel):
    """The body of every status from 400 on."""

    detail: str


# Service and sessions


class ClientConfigRequest(WireModel):
    """The body of client/config and client/dynamic_config."""

    sdk_version: Text = ""


class ClientConfigResponse(WireModel):
    """Only what we set; the SDK has defaults for the rest."""

    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    sample_max_concurrent_requests: int = 2000
    sample_use_retrieve_futures: bool = True
    """One poll waits for all samples of a sampling client: they hold no connections, and may be more than 2,000."""
    sample_join_sampling_session: bool = False
    create_model_via_load_weights: bool = False
    pjwt_auth_enabled: bool = False
    use_pyqwest_transport: bool = True


class ClientDynamicConfigResponse(WireModel):
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class SupportedModel(WireModel):
    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True
    hidden_size: int | None = None
    """Hidden size of the model; like `architecture` a field of Palestra, by which clients choose a learning rate."""
    architecture: str | None = None


class CapabilitiesResponse(WireModel):
    supported_models: list[SupportedModel]


class CreateSessionRequest(WireModel):
    tags: Annotated[list[Name], Field(max_length=64)] = []
    user_metadata: Metadata | None = None
    sdk_version: Text = ""
    project_id: Id | None = None
    display_name: Text | None = None


class CreateSessionResponse(WireModel):
    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    type: Literal["create_session"] = "create_session"


class SessionHeartbeatRequest(WireModel):
    session_id: Id


class SessionHeartbeatResponse(WireModel):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(WireModel):
    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(WireModel):
    reason: FinishReason
    detail: Text | None = None


class TelemetryRequest(WireModel):
    """Events are not read: they contain tracebacks and keys."""

    events: Annotated[list[JsonObject], Field(max_length=1000)]
    platform: Text = ""
    sdk_version: Text = ""
    session_id: Id
    process_uuid: Text = ""


class TelemetryResponse(WireModel):
    status: Literal["accepted"] = "accepted"


# Training


class LoraConfigBody(WireModel):
    rank: Annotated[int, Field(ge=1, le=INT32)] = 32
    seed: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfigBody(WireModel):
    type: Name = "adamw"


class CreateModelRequest(WireModel):
    session_id: Id
    model_seq_id: Seq
    base_model: Name
    user_metadata: Metadata | None = None
    lora_config: LoraConfigBody = LoraConfigBody()
    optimizer_config: OptimizerConfigBody = OptimizerConfigBody()


class ModelRequest(WireModel):
    """The body of get_info and unload_model."""

    model_id: Id


class ModelData(WireModel):
    model_name: str
    tokenizer_id: str | None = None
    arch: str | None = None


class GetInfoResponse(WireModel):
    model_id: str
    model_data: ModelData
    optimizer_config: OptimizerConfigBody = OptimizerConfigBody()
    is_lora: bool = True
    lora_rank: int
    model_name: str
    type: Literal["get_info"] = "get_info"


class AdamParamsBody(WireModel):
    learning_rate: Finite = 1e-4
    beta1: Finite = 0.9
    beta2: Finite = 0.95
    eps: Finite = 1e-12
    weight_decay: Finite = 0.0
    grad_clip_norm: Finite = 0.0


class OptimizerParams(WireModel):
    """Parameters of an optimizer other than Adam; only its name is read."""

    type: Name


class OptimStepRequest(WireModel):
    model_id: Id
    seq_id: TrainSeq
    adam_params: AdamParamsBody | None = None
    optimizer_params: OptimizerParams | None = None

    @model_validator(mode="after")
    def _one_of_the_two(self) -> OptimStepRequest:
        if (self.adam_params is None) == (self.optimizer_params is None):
            raise ValueError("send either adam_params or optimizer_params")
        return self


# Weights


class SaveWeightsRequest(WireModel):
    model_id: Id
    seq_id: TrainSeq
    path: Name | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveWeightsForSamplerRequest(WireModel):
    """Named by `path`, or kept for one sampling session."""

    model_id: Id
    seq_id: TrainSeq
    path: Name | None = None
    sampling_session_seq_id: Seq | None = None
    ttl_seconds: Ttl | None = None
    user_metadata: Metadata | None = None

    @model_validator(mode="after")
    def _one_of_the_two(self) -> SaveWeightsForSamplerRequest:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("send either path or sampling_session_seq_id")
        return self


class SaveWeightsExternalRequest(WireModel):
    model_id: Id
    seq_id: TrainSeq
    path: Name
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: Annotated[list[Text], Field(max_length=64)] | None = None


class LoadWeightsRequest(WireModel):
    """Loads into a model, or (`session_id`) as a new one."""

    path: Text
    optimizer: bool
    model_id: Id | None = None
    seq_id: TrainSeq | None = None
    session_id: Id | None = None
    model_seq_id: Seq | None = None
    base_model: Name | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfigBody | None = None
    weights_access_token: Text | None = None

    @model_validator(mode="after")
    def _one_address(self) -> LoadWeightsRequest:
        given = [x is not None for x in (self.model_id, self.seq_id, self.session_id, self.model_seq_id)]
        if given not in ([True, True, False, False], [False, False, True, True]):
            raise ValueError("send model_id and seq_id, or session_id and model_seq_id")
        return self


class WeightsInfoRequest(WireModel):
    tinker_path: Text


class WeightsInfoResponse(WireModel):
    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: OptimizerConfigBody = OptimizerConfigBody()


# Sampling


class CreateSamplingSessionRequest(WireModel):
    session_id: Id
    sampling_session_seq_id: Seq
    base_model: Name | None = None
    model_path: Text | None = None
    """Takes precedence over `base_model`."""

    @model_validator(mode="after")
    def _something_to_sample(self) -> CreateSamplingSessionRequest:
        if self.base_model is None and self.model_path is None:
            raise ValueError("send base_model or model_path")
        return self


class CreateSamplingSessionResponse(WireModel):
    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionRequest(WireModel):
    sampling_session_id: Id


class JoinSamplingSessionResponse(WireModel):
    client_counter: int
    type: Literal["join_sampling_session"] = "join_sampling_session"


MOST_NAMED = 1024


class ContinueSamplesRequest(WireModel):
    sampling_session_ids: Annotated[list[Id], Field(max_length=MOST_NAMED)]
    """Samplers whose samples go on; those that are gone are left out."""
    to: Id
    """The sampler whose weights they get."""
    keep_keys: bool = False
    """Keep keys and values that older weights have computed, instead of computing them anew."""


class ContinueSamplesResponse(WireModel):
    changed: int
    """Number of samples that go on with the new weights."""


class SamplingLoadResponse(WireModel):
    waiting: int
    """Samples that wait for a row of the batch, at the engine's last report; it reports once a second."""
    running: int | None = None
    """Sequences that have a row; null: not known."""
    kv_used: float
    """Share of the cache's pages that they hold."""
    cache_tokens: int
    """Tokens that the cache of keys and values can hold; 0: not known."""


class SequenceWeightsRequest(WireModel):
    sequence_ids: Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=MOST_NAMED)]


class WeightsChangeBody(WireModel):
    start: int
    """The first token that these weights drew."""
    sampling_session_id: str
    is_exact: bool
    """False: keys and values of older weights were kept."""


class SequenceWeightsResponse(WireModel):
    sequences: dict[str, list[WeightsChangeBody]]
    """Where the weights of a sequence changed; without an entry, those of its request drew all of it."""


# Futures


class FutureResponse(WireModel):
    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class RetrieveFutureRequest(WireModel):
    request_id: Id
    allow_metadata_only: bool = False


class TryAgainResponse(WireModel):
    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    queue_state_reason: str | None = None
    type: Literal["try_again"] = "try_again"


class FuturesTarget(WireModel):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Id
    cloned_sampler_id: Seq = 0


class RetrieveFuturesRequest(WireModel):
    target: FuturesTarget
    prev_cursor: Seq = 0
    timeout: Annotated[Finite, Field(ge=0)] | None = None
    retrieved_request_ids: Annotated[list[Id], Field(max_length=100_000)] = []


class FutureCompletion(WireModel):
    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class RetrieveFuturesResponse(WireModel):
    completions: list[FutureCompletion]
    cursor: int


class CancelFutureRequest(WireModel):
    request_id: Id
