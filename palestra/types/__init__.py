"""Records that cross a boundary. Imports nothing of ours, no torch.

`training` and `sampling` have the requests, `engine` the messages that carry them to workers.
"""

from palestra.types.pictures import Picture, PlacedImage, VisionCard
from palestra.types.sampling import (
    MAX_GRAMMAR,
    MAX_TEMPERATURE,
    Grammar,
    GrammarKind,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SamplingParams,
    StopReason,
    TopLogprobs,
)
from palestra.types.training import (
    AdamParams,
    Checkpointing,
    Datum,
    ImageChunk,
    LoraConfig,
    LossName,
    RoutedExperts,
    TensorData,
    TextChunk,
)

__all__ = [
    "MAX_GRAMMAR",
    "MAX_TEMPERATURE",
    "AdamParams",
    "Checkpointing",
    "Datum",
    "Grammar",
    "GrammarKind",
    "ImageChunk",
    "LoraConfig",
    "LossName",
    "Picture",
    "PlacedImage",
    "RoutedExperts",
    "SampleRequest",
    "SampleResult",
    "SampledSequence",
    "SamplingParams",
    "StopReason",
    "TensorData",
    "TextChunk",
    "TopLogprobs",
    "VisionCard",
]
