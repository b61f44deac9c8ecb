"""The model server that ships with us; it is in `palestra.gym.models`."""

from __future__ import annotations

from palestra.gym.models import VLLMModel

SERVER = VLLMModel
