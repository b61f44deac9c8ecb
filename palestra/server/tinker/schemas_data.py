"""JSON bodies that carry data: samples, and the passes of SDK 0.24 and older. `decode` converts them to records.

Validation of a list ends at its first wrong item: a million errors help no client.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from palestra.server.tinker.schemas import INT32, INT64, Finite, Id, Name, Seq, Text, TrainSeq, WireModel
from palestra.types import MAX_TEMPERATURE

MAX_SAMPLES = 4096
MAX_TOKENS = 1 << 20  # of a chunk: more than any context, and few enough to convert at once

Tokens = Annotated[list[Annotated[int, Field(ge=-INT32 - 1, le=INT32)]], Field(fail_fast=True, max_length=MAX_TOKENS)]
Whole = Annotated[list[Annotated[int, Field(ge=-INT64 - 1, le=INT64)]], Field(fail_fast=True)]
Numbers = Annotated[list[float], Field(fail_fast=True)]
Stops = Annotated[list[Annotated[str, StringConstraints(min_length=1)]], Field(fail_fast=True)]


class TensorBody(WireModel):
    data: Whole | Numbers
    dtype: Literal["float32", "int64"]
    shape: Annotated[list[Seq], Field(max_length=8)] | None = None
    sparse_crow_indices: Whole | None = None
    sparse_col_indices: Whole | None = None


class ModelInputChunk(WireModel):
    """Encoded text has tokens, an image the bytes of its file, a pointer to one its URL; other types are refused by
    name."""

    type: Text = "encoded_text"
    tokens: Tokens | None = None
    data: str | None = None
    """The file of an image in base64."""
    location: str | None = None
    """The data: URL of an image_asset_pointer."""
    expected_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = None
    """How many positions the client thinks that an image takes; another number is refused."""


class ModelInput(WireModel):
    chunks: Annotated[list[ModelInputChunk], Field(fail_fast=True)]


class DatumBody(WireModel):
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorBody]


class PassInput(WireModel):
    data: Annotated[list[DatumBody], Field(min_length=1, fail_fast=True)]
    loss_fn: Name
    loss_fn_config: dict[str, Finite | Text] | None = None


class ForwardBackwardRequest(WireModel):
    """The JSON body of SDK 0.24 and older."""

    model_id: Id
    seq_id: TrainSeq
    forward_backward_input: PassInput


class ForwardRequest(WireModel):
    """The JSON body of SDK 0.24 and older."""

    model_id: Id
    seq_id: TrainSeq
    forward_input: PassInput


class SamplingParamsBody(WireModel):
    max_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    seed: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    stop: Annotated[str, StringConstraints(min_length=1)] | Stops | Tokens | None = None
    temperature: Annotated[Finite, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32)] = -1
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0


class SampleRequestBody(WireModel):
    """The body of asample, and of sample in older SDKs."""

    prompt: ModelInput
    sampling_params: SamplingParamsBody
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    sampling_session_id: Id | None = None
    seq_id: Seq | None = None
    base_model: Name | None = None
    model_path: Text | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=INT32)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=INT32)] = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=INT32)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, le=INT32)] | None = None
    record_stability_info: bool | None = None
    """Remember which experts each sequence visits, for training requests with provenance spans."""
