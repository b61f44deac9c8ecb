"""The learning rate of a run whose config says `optimizer.lr: auto`, by the kind of run and the size of the model.

The rule for SFT is the one that Thinking Machines published for LoRA with Tinker's cookbook: 5e-5 for full fine-tuning,
times 10 for LoRA, times (2000 / hidden size) ** exponent, fitted for the Llama and Qwen families, whatever the rank.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import httpx
from msgspec import Struct

from palestra.config.api_key import api_key
from palestra.config.train import DpoConfig, GrpoConfig, OptimizerConfig, RunConfig
from palestra.endpoints.model_folders import SetupError, model_folder
from palestra.episodes.client.http_exchange import CONNECT_S
from palestra.runs.listener import RunListener
from palestra.util.json_types import JsonObject

C = TypeVar("C", bound=RunConfig)

AUTO = "auto"
LORA_RATE = 5e-5 * 10
EXPONENTS = {"qwen": 0.0775, "llama": 0.781}
OTHER_EXPONENT = 0.28
"""For other families: 3.5e-4 at a hidden size of 7168, between the best rates that the cookbook found there (4e-4 for
DeepSeek-V3.1, 3e-4 for Kimi-K2)."""
TIMEOUT_S = 10.0


class RateKind(StrEnum):
    """Kinds of training that need different learning rates."""

    SFT = "SFT"
    RL = "RL"
    DPO = "DPO"


SHARES = {RateKind.SFT: 1.0, RateKind.RL: 0.1, RateKind.DPO: 0.02}
"""Share of the SFT rule that each kind gets. RL: a step learns from few bits, and one that is too large is not
corrected by the data, since the policy draws its own. DPO: 1e-5, the cookbook's default, since beta lets even small
changes of answers saturate the loss."""
SMALLEST = 512
"""Hidden size from which on the rule is used. The families it was fitted to begin at 1024, and at 256 it gives a tenth
or less of the rates with which the bundled models learn best."""
SMALL_RATES = {RateKind.SFT: 2e-3, RateKind.RL: 1e-3, RateKind.DPO: 1e-3}
"""Rates for smaller models: those of the shipped examples, whose models have a hidden size of 256."""


class ModelShape(Struct, frozen=True):
    """What the rule needs to know about a model."""

    hidden_size: int
    architecture: str

    @property
    def exponent(self) -> float:
        return next((one for name, one in EXPONENTS.items() if name in self.architecture.lower()), OTHER_EXPONENT)


def auto_rate(kind: RateKind, shape: ModelShape) -> float:
    """The learning rate by the rule, in two digits."""
    if shape.hidden_size < SMALLEST:
        return SMALL_RATES[kind]
    rate = SHARES[kind] * LORA_RATE * (2000 / shape.hidden_size) ** shape.exponent
    return float(f"{rate:.1e}")


async def with_learning_rates(config: C, url: str | None, listener: RunListener) -> C:
    """Returns the config with numbers in place of `auto`, and says which. `url`: the server, unless it is the run's
    own. Raises SetupError if nothing tells the size of the model."""
    imitation = config.imitation if isinstance(config, GrpoConfig) else None
    optimizers = [config.optimizer, *([imitation.optimizer] if imitation is not None else [])]
    if all(one.lr != AUTO for one in optimizers):
        return config
    shape = await find_shape(config, url)

    def resolved(optimizer: OptimizerConfig, kind: RateKind, what: str) -> OptimizerConfig:
        if optimizer.lr != AUTO:
            return optimizer
        rate = auto_rate(kind, shape)
        listener.note(f"{what} {rate:g} (auto: {kind}, hidden size {shape.hidden_size}, {shape.architecture})")
        return optimizer.model_copy(update={"lr": rate})

    changes: dict[str, object] = {"optimizer": resolved(config.optimizer, kind_of(config), "learning rate")}
    if imitation is not None:
        optimizer = resolved(imitation.optimizer, RateKind.SFT, "learning rate of the imitation")
        changes["imitation"] = imitation.model_copy(update={"optimizer": optimizer})
    return config.model_copy(update=changes)


def kind_of(config: RunConfig) -> RateKind:
    if isinstance(config, GrpoConfig):
        return RateKind.RL
    return RateKind.DPO if isinstance(config, DpoConfig) else RateKind.SFT


async def find_shape(config: RunConfig, url: str | None) -> ModelShape:
    """The shape as the server tells it, or else by the model's files here."""
    if url is not None and (shape := await served_shape(url, config.model.name)) is not None:
        return shape
    try:
        folders = [model_folder(config.model)]
    except ValueError:
        folders = []
    folders += [config.model.tokenizer] if config.model.tokenizer is not None else []
    for folder in folders:
        if (found := shape_in(folder)) is not None:
            return found
    where = " or ".join([*([url] if url is not None else []), *(f"{folder / 'config.json'}" for folder in folders)])
    raise SetupError(
        f"optimizer.lr: auto needs the hidden size of {config.model.name}, and {where} does not tell it; give a "
        "number: optimizer.lr=1e-4, or put the model's config.json into the folder of model.tokenizer"
    )


async def served_shape(url: str, model: str) -> ModelShape | None:
    """The shape of a model of one of our servers; None if the server does not tell it, as hosted Tinker does not."""
    timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_S)
    try:
        async with httpx.AsyncClient(base_url=url, headers={"x-api-key": api_key()}, timeout=timeout) as http:
            models = (await http.get("/api/v1/get_server_capabilities")).json()["supported_models"]
        about = next(one for one in models if one["model_name"] == model)
        return shape_of(about["hidden_size"], about["architecture"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError, StopIteration):
        return None


def shape_in(folder: Path) -> ModelShape | None:
    """The shape that a folder's config.json states."""
    try:
        config: JsonObject = json.loads((folder / "config.json").read_bytes())
        text = config.get("text_config") or config
        return shape_of(text["hidden_size"], (config.get("architectures") or [config["model_type"]])[0])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def shape_of(hidden_size: object, architecture: object) -> ModelShape | None:
    if not isinstance(hidden_size, int) or hidden_size <= 0:
        return None
    return ModelShape(hidden_size, str(architecture))
