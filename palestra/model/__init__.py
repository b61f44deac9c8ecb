"""The compute core: load a model, train and sample LoRA adapters on it.

Begin at `decoder`, then `trainer` and `sampler`.
"""

from palestra.model.decoder import Decoder
from palestra.model.errors import (
    AdapterError,
    DataError,
    ModelError,
    NonFiniteGradient,
    TokenizerError,
    UnsupportedModel,
    WeightsError,
)
from palestra.model.loading.model_folder import Model, load_model, load_tokenizer
from palestra.model.loading.spec import ModelSpec
from palestra.model.lora.adapter_files import (
    load_adapter,
    load_into,
    load_snapshot,
    pack_adapter,
    save_adapter,
    unpack_adapter,
)
from palestra.model.lora.adapters import Adapter, AdapterPool
from palestra.model.lora.merged_export import export_merged
from palestra.model.sampling.logit_filters import TokenMask
from palestra.model.sampling.running_requests import Failed, Finished, StepOutput, TokenEvent
from palestra.model.sampling.sampler import Sampler
from palestra.model.training.losses import combine_metrics
from palestra.model.training.optimizer import StepResult
from palestra.model.training.prepared import TrainItem, encode
from palestra.model.training.router_metrics import router_metrics
from palestra.model.training.trainer import DatumResult, ForwardPass, Trainer

__all__ = [
    "Adapter",
    "AdapterError",
    "AdapterPool",
    "DataError",
    "DatumResult",
    "Decoder",
    "Failed",
    "Finished",
    "ForwardPass",
    "Model",
    "ModelError",
    "ModelSpec",
    "NonFiniteGradient",
    "Sampler",
    "StepOutput",
    "StepResult",
    "TokenEvent",
    "TokenMask",
    "TokenizerError",
    "TrainItem",
    "Trainer",
    "UnsupportedModel",
    "WeightsError",
    "combine_metrics",
    "encode",
    "export_merged",
    "load_adapter",
    "load_into",
    "load_model",
    "load_snapshot",
    "load_tokenizer",
    "pack_adapter",
    "router_metrics",
    "save_adapter",
    "unpack_adapter",
]
