"""JSON bodies of the SDK are read, ours are read by the SDK, wrong ones are refused in one line."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from tinker import types as sdk
from tinker.types import optimizer, session_search_request, try_again_response

from palestra.server.core.wire_errors import WireError
from palestra.server.tinker import schemas, schemas_data, schemas_rest
from palestra.server.tinker.decode import parse_json

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
PATH = "tinker://s:train:0/weights/a"
CHECKPOINT = schemas_rest.CheckpointObject(
    checkpoint_id="weights/a", checkpoint_type="training", time=NOW, tinker_path=PATH
)
RUN = schemas_rest.TrainingRun(
    training_run_id="s:train:0", base_model="m", model_owner="me", last_request_time=NOW, last_checkpoint=CHECKPOINT
)

REQUESTS: list[tuple[BaseModel, type[BaseModel]]] = [
    (sdk.ClientConfigRequest(sdk_version="0.36.0"), schemas.ClientConfigRequest),
    (
        sdk.CreateSessionRequest(tags=["a"], user_metadata={"n": 1}, sdk_version="0.36.0", display_name="d"),
        schemas.CreateSessionRequest,
    ),
    (sdk.SessionHeartbeatRequest(session_id="s"), schemas.SessionHeartbeatRequest),
    (
        sdk.CreateModelRequest(session_id="s", model_seq_id=0, base_model="m", lora_config=sdk.LoraConfig(rank=8)),
        schemas.CreateModelRequest,
    ),
    (sdk.GetInfoRequest(model_id="s:train:0"), schemas.ModelRequest),
    (sdk.UnloadModelRequest(model_id="s:train:0"), schemas.ModelRequest),
    (sdk.OptimStepRequest(optim_params=sdk.AdamParams(), model_id="m", seq_id=2), schemas.OptimStepRequest),
    (
        sdk.OptimStepRequest(optim_params=optimizer.DimuonParams(learning_rate=1), model_id="m", seq_id=2),
        schemas.OptimStepRequest,
    ),
    (
        sdk.SaveWeightsRequest(model_id="m", path="a", seq_id=2, ttl_seconds=3600, user_metadata={"k": "v"}),
        schemas.SaveWeightsRequest,
    ),
    (
        sdk.SaveWeightsForSamplerRequest(model_id="m", sampling_session_seq_id=0, seq_id=2),
        schemas.SaveWeightsForSamplerRequest,
    ),
    (sdk.SaveWeightsForSamplerRequest(model_id="m", path="a", seq_id=2), schemas.SaveWeightsForSamplerRequest),
    (sdk.SaveWeightsExternalRequest(model_id="m", path="a", seq_id=2), schemas.SaveWeightsExternalRequest),
    (sdk.LoadWeightsRequest(model_id="m", seq_id=1, path=PATH, optimizer=True), schemas.LoadWeightsRequest),
    (sdk.LoadWeightsRequest(session_id="s", model_seq_id=1, path=PATH, optimizer=False), schemas.LoadWeightsRequest),
    (
        sdk.CreateSamplingSessionRequest(session_id="s", sampling_session_seq_id=0, base_model="m"),
        schemas.CreateSamplingSessionRequest,
    ),
    (sdk.JoinSamplingSessionRequest(sampling_session_id="s:sample:0"), schemas.JoinSamplingSessionRequest),
    (sdk.FutureRetrieveRequest(request_id="r", allow_metadata_only=True), schemas.RetrieveFutureRequest),
    (
        sdk.FuturesRetrieveRequest(target=sdk.SamplingSessionFuturesTarget(sampling_session_id="s:sample:0")),
        schemas.RetrieveFuturesRequest,
    ),
    (
        sdk.CopyWeightsRequest(session_id="s", model_seq_id=0, source_path=PATH, ttl_seconds=3600),
        schemas_rest.CopyWeightsRequest,
    ),
    (
        session_search_request.SessionSearchRequest(
            cursor={"last_created_at": NOW, "last_session_id": "s"},  # type: ignore[arg-type]
            statuses=[{"type": "client_finished", "reasons": ["success"]}],  # type: ignore[list-item]
            user_metadata={"a": "b"},
        ),
        schemas_rest.SearchRequest,
    ),
]

RESPONSES: list[tuple[BaseModel, type[BaseModel]]] = [
    (schemas.ClientConfigResponse(), sdk.ClientConfigResponse),
    (schemas.ClientDynamicConfigResponse(), sdk.ClientDynamicConfigResponse),
    (
        schemas.CapabilitiesResponse(supported_models=[schemas.SupportedModel(model_name="m")]),
        sdk.GetServerCapabilitiesResponse,
    ),
    (schemas.CreateSessionResponse(session_id="s", warning_message="w"), sdk.CreateSessionResponse),
    (schemas.SessionHeartbeatResponse(), sdk.SessionHeartbeatResponse),
    (schemas.TelemetryResponse(), sdk.TelemetryResponse),
    (
        schemas.GetInfoResponse(
            model_id="m", model_data=schemas.ModelData(model_name="n"), lora_rank=8, model_name="n"
        ),
        sdk.GetInfoResponse,
    ),
    (
        schemas.WeightsInfoResponse(base_model="m", lora_rank=8, train_unembed=True, train_mlp=True, train_attn=False),
        sdk.WeightsInfoResponse,
    ),
    (schemas.CreateSamplingSessionResponse(sampling_session_id="s:sample:0"), sdk.CreateSamplingSessionResponse),
    (schemas.JoinSamplingSessionResponse(client_counter=1), sdk.JoinSamplingSessionResponse),
    (schemas.FutureResponse(request_id="r", sample_sequence_ids=["r:0"]), sdk.UntypedAPIFuture),
    (schemas.TryAgainResponse(request_id="r", queue_state="paused_capacity"), try_again_response.TryAgainResponse),
    (
        schemas.RetrieveFuturesResponse(
            completions=[schemas.FutureCompletion(state="failed", request_id="r")], cursor=1
        ),
        sdk.FuturesRetrieveResponse,
    ),
    (RUN, sdk.TrainingRun),
    (
        schemas_rest.TrainingRunsResponse(
            training_runs=[RUN], cursor=schemas_rest.PageCursor(offset=0, limit=1, total_count=1)
        ),
        sdk.TrainingRunsResponse,
    ),
    (schemas_rest.CheckpointsResponse(checkpoints=[CHECKPOINT]), sdk.CheckpointsListResponse),
    (schemas_rest.ExternalWeightsUrlsResponse(urls={"a": "http://b"}, expires=NOW), sdk.ExternalWeightsUrlsResponse),
    (schemas_rest.CopyWeightsResponse(tinker_path=PATH), sdk.CopyWeightsResponse),
    (schemas_rest.SamplerResponse(sampler_id="s:sample:0", base_model="m"), sdk.GetSamplerResponse),
    (schemas_rest.SessionsResponse(sessions=["s"]), sdk.ListSessionsResponse),
    (schemas_rest.SessionResponse(training_run_ids=[], sampler_ids=[]), sdk.GetSessionResponse),
    (
        schemas_rest.SearchResponse(
            sessions=[
                schemas_rest.SessionSummaryObject(
                    session_id="s",
                    created_at=NOW,
                    owner="me",
                    project_id="p",
                    status=schemas_rest.SessionStatusObject(
                        type="client_finished", reason=schemas.FinishReason(type="success")
                    ),
                    checkpoints_count=0,
                )
            ],
            next_cursor=schemas_rest.SearchCursorObject(last_created_at=NOW, last_session_id="s"),
        ),
        sdk.SessionSearchResponse,
    ),
]


def pair_name(value: object) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


@pytest.mark.parametrize(("theirs", "ours"), REQUESTS, ids=pair_name)
def test_requests_of_the_sdk_are_read(theirs: BaseModel, ours: type[BaseModel]) -> None:
    body = theirs.model_dump(exclude_none=True, mode="json") | {"a_field_of_tomorrow": {"x": [1]}}
    read = parse_json(ours, json.dumps(body).encode())
    for name, value in read.model_dump(exclude_unset=True, mode="json").items():
        if isinstance(value, str | int | bool):
            assert value == body[name]
    assert ours.model_validate(body) == read  # as FastAPI does it


@pytest.mark.parametrize(("ours", "theirs"), RESPONSES, ids=pair_name)
def test_responses_are_read_by_the_sdk(ours: BaseModel, theirs: type[BaseModel]) -> None:
    for exclude_none in (True, False):
        theirs.model_validate_json(ours.model_dump_json(exclude_none=exclude_none))


OPTIM_STEP = {"model_id": "m", "seq_id": 1, "adam_params": {}}


@pytest.mark.parametrize(
    ("schema", "body", "said"),
    [
        (schemas.OptimStepRequest, OPTIM_STEP | {"seq_id": 0}, "seq_id: .*, found 0"),
        (schemas.OptimStepRequest, OPTIM_STEP | {"seq_id": True}, "seq_id"),
        (schemas.OptimStepRequest, OPTIM_STEP | {"seq_id": 2**63}, "seq_id"),
        (schemas.OptimStepRequest, OPTIM_STEP | {"model_id": "m\0"}, "model_id"),
        (schemas.OptimStepRequest, OPTIM_STEP | {"adam_params": None}, "send either"),
        (schemas.OptimStepRequest, OPTIM_STEP | {"adam_params": {"beta1": "0.9"}}, "adam_params.beta1: .*'0.9'"),
        (schemas.OptimStepRequest, OPTIM_STEP | {"adam_params": {"eps": float("inf")}}, "adam_params.eps"),
        (schemas.OptimStepRequest, [], "found list"),
        (schemas.CreateSessionRequest, {"user_metadata": {"a": "x" * 70_000}}, "metadata is longer"),
        (schemas.CreateSessionRequest, {"user_metadata": {"a": "\0"}}, "user_metadata.a"),
        (schemas.CreateSessionRequest, {"user_metadata": "a"}, "user_metadata"),
        (schemas.CreateSessionRequest, {"tags": ["x" * 257]}, "tags.0"),
        (schemas.SaveWeightsForSamplerRequest, {"model_id": "m", "seq_id": 1}, "send either"),
        (schemas.LoadWeightsRequest, {"path": PATH, "optimizer": True, "model_id": "m"}, "session_id and model_seq_id"),
        (schemas.CreateSamplingSessionRequest, {"session_id": "s", "sampling_session_seq_id": 0}, "base_model"),
        (schemas_rest.CopyWeightsRequest, {"source_path": PATH}, "destination_project_id"),
        (schemas_rest.TtlRequest, {}, "ttl_seconds: Field required"),
        (schemas_data.ModelInput, {"chunks": [{"tokens": ["a"] * 1000}]}, "chunks.0.tokens.0"),
    ],
)
def test_wrong_bodies_are_refused_in_one_line(schema: type[BaseModel], body: Any, said: str) -> None:
    with pytest.raises(WireError, match=said) as caught:
        parse_json(schema, json.dumps(body).encode())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"user_metadata":{"a":"\\ud800"}}'])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="JSON"):
        parse_json(schemas.CreateSessionRequest, body)


def test_metadata_becomes_text() -> None:
    body = b'{"user_metadata": {"a": "b", "n": 1, "x": [1.5, null]}}'
    assert parse_json(schemas.CreateSessionRequest, body).user_metadata == {"a": "b", "n": "1", "x": "[1.5, null]"}


def test_metadata_that_cannot_be_stored_is_refused() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    for odd in ({"a": deep}, {"a": "\ud800"}, {"\ud800": "a"}, {1: "a"}):
        with pytest.raises(ValidationError):
            schemas.CreateSessionRequest.model_validate({"user_metadata": odd})


def test_an_expiry_may_be_taken_back() -> None:
    assert parse_json(schemas_rest.TtlRequest, b'{"ttl_seconds": null}').ttl_seconds is None
