"""The compute core: load a model, train and sample LoRA adapters on it.

Begin at `decoder`, then `trainer` and `sampler`.
"""

from palestra.model.adapter_files import export_merged, load_adapter, load_into, load_snapshot, save_adapter
from palestra.model.adapters import Adapter, AdapterPool
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
from palestra.model.loading import Model, load_model, load_tokenizer
from palestra.model.losses import combine_metrics
from palestra.model.optimizer import StepResult
from palestra.model.packing import TrainItem, encode
from palestra.model.sampler import Failed, Finished, Sampler, StepOutput, TokenEvent
from palestra.model.sampling import TokenMask
from palestra.model.spec import ModelSpec
from palestra.model.trainer import DatumResult, ForwardPass, Trainer

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
    "save_adapter",
]
