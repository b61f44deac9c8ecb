"""Errors below the engine, named for the boundary that broke."""

from __future__ import annotations


class ModelError(Exception):
    """Something about a model, its files or a request to it; the message says what to do."""


class UnsupportedModel(ModelError):
    """The folder holds a model this core cannot run."""


class WeightsError(ModelError):
    """A weight file is missing, cut short, or not of the shape the config promises."""


class TokenizerError(ModelError):
    """The folder has no usable tokenizer."""


class AdapterError(ModelError):
    """A LoRA adapter is unknown, too large, or does not fit the model."""


class DataError(ModelError):
    """A training datum or sampling request is malformed: the caller's fault; other requests are not affected."""


class NonFiniteGradient(ModelError):
    """An optimizer step was refused: the accumulated gradient holds NaN or infinity."""
