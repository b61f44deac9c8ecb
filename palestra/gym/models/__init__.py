"""Model servers: the three APIs in front of any OpenAI-compatible endpoint, with token ids inline. Begin at `base`."""

from __future__ import annotations

from palestra.gym.models.openai import OpenAIModel
from palestra.gym.models.vllm import VLLMModel

__all__ = ["OpenAIModel", "VLLMModel"]
