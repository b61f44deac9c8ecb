"""Tests what a vLLM server can do: which log-probabilities it returns, which adapters change its answers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from palestra.config.serve import VllmConfig
from palestra.server.core.checkpoints.adapter_transfers import AdapterTransfers, TransferredAdapter
from palestra.server.replicas.errors import ReplicaRefused, ReplicaUnfit, UnknownAdapter
from palestra.server.vllm.client import VllmClient
from palestra.types import LoraConfig
from palestra.types.engine import PACKED_CONFIG
from palestra.util.json_types import JsonObject

LORA_ROUTE = "/v1/load_lora_adapter"
STRONG = 0.5  # weights of the test adapters: they change every answer
SEEN = 1e-3  # the smallest change of an answer that counts
BESIDE = 200  # tokens that an adapter samples while the base model is asked; the context may be short
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Not lm_head: with it vLLM scores prompts by other requests' adapters, or crashes (its issues 16668 and 51594)."""
FLAGS = (
    f"--enable-lora --lora-target-modules {' '.join(TARGETS)} --max-lora-rank {{}} "
    "--logprobs-mode processed_logprobs --generation-config vllm"
)


@dataclass(frozen=True, slots=True)
class LoraTargets:
    """The parts of a model that an adapter may change."""

    train_attn: bool
    train_mlp: bool
    train_unembed: bool = False
    keeps_base: bool = True
    """Whether answers without an adapter are the base model's own while others sample with theirs."""


@dataclass(frozen=True, slots=True)
class CapabilityProbe:
    parts: Mapping[str, TransferredAdapter]
    """Adapters by the part they change; the one for attention has the highest rank that is to be served."""
    plain: TransferredAdapter
    """An adapter that changes nothing: it is used for the base model if a server mixes up requests without an
    adapter."""


def make_trials(transfers: AdapterTransfers, model: Path, vocabulary: int, max_rank: int) -> CapabilityProbe:
    config: JsonObject = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    attention = heads * (config.get("head_dim") or hidden // heads)
    trials = {
        "train_attn": ("model.layers.0.self_attn.o_proj", attention, hidden, max_rank),
        "train_mlp": ("model.layers.0.mlp.down_proj", config["intermediate_size"], hidden, 1),
        "train_unembed": ("lm_head", hidden, vocabulary, 1),
    }
    parts = {
        part: transfers.put(_pack_adapter(module, inputs, outputs, rank, STRONG), LoraConfig(rank=rank))
        for part, (module, inputs, outputs, rank) in trials.items()
    }
    module, inputs, outputs, _ = trials["train_attn"]
    return CapabilityProbe(parts, transfers.put(_pack_adapter(module, inputs, outputs, 1, 0.0), LoraConfig(rank=1)))


class StartupWait:
    """What a starting server is waited for at the moment, and since when."""

    def __init__(self, what: str, limit: str):
        self._changed = asyncio.Event()
        self.begin(what, limit)

    def begin(self, what: str, limit: str = "trial_s") -> None:
        """`limit` is the setting that says how long it may take."""
        self.what, self.limit, self._since = what, limit, time.monotonic()
        self._changed.set()

    async def changes_within(self, seconds: float) -> bool:
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                return await self._changed.wait()
        except TimeoutError:
            return False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since


async def look_over(
    client: VllmClient, model: str, prefix: str, vllm: VllmConfig, trials: CapabilityProbe, awaited: StartupWait
) -> LoraTargets:
    """Tests a server; `prefix` begins the names of adapters. Raises ReplicaUnfit if it was not started as it must
    be."""
    flags = FLAGS.format(vllm.max_lora_rank)
    if LORA_ROUTE not in await client.routes():
        raise ReplicaUnfit(
            f"vLLM at {client.url} does not load adapters at runtime; start it with "
            f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and {flags}"
        )
    awaited.begin("its first sample")
    if abs(await _biased_logprob(client, model)) > SEEN:
        raise ReplicaUnfit(f"vLLM at {client.url} returns raw logprobs; start it with {flags}")
    base = await _greedy(client, model)
    changed: dict[str, bool] = {}
    for part, adapter in trials.parts.items():
        awaited.begin(f"its first sample with an adapter ({part})")
        changed[part] = await _changes(client, base, part, adapter, prefix)
    if changed["train_unembed"]:
        raise ReplicaUnfit(
            f"vLLM at {client.url} lets adapters change lm_head, which breaks prompt logprobs; use {flags}"
        )
    awaited.begin("samples with and without an adapter beside each other")
    keeps_base = await _keeps(client, model, base, trials.parts["train_attn"], prefix, vllm.max_loras)
    return LoraTargets(train_attn=changed["train_attn"], train_mlp=changed["train_mlp"], keeps_base=keeps_base)


async def _changes(
    client: VllmClient, base: tuple[str, float], part: str, adapter: TransferredAdapter, prefix: str
) -> bool:
    """Whether an adapter of this part changes the answer."""
    name = prefix + adapter.digest
    try:
        await client.load(name)
    except UnknownAdapter:
        raise ReplicaUnfit(
            f"vLLM at {client.url} cannot fetch adapters; install palestra-lora there, and start it with PALESTRA_URL, "
            "this server's address, and PALESTRA_KEY, a key with the right 'replica'"
        ) from None
    except ReplicaRefused as e:
        if part == "train_attn":
            raise ReplicaUnfit(
                f"vLLM at {client.url} cannot load an adapter of rank {adapter.lora.rank} (vllm.max_lora_rank): {e}"
            ) from None
        return False
    try:
        return _differ(base, await _greedy(client, name))
    finally:
        await client.unload(name)


async def _keeps(
    client: VllmClient, model: str, base: tuple[str, float], adapter: TransferredAdapter, prefix: str, slots: int
) -> bool:
    """Whether the base model answers as it did (`base`) while an adapter samples and every slot for one is taken.

    vLLM's LoRA in plain torch (its CPU build, 0.32) applies the last slot's adapter to requests that have none.
    """
    names = [f"{prefix}{adapter.digest}-{slot}" for slot in range(slots)]
    try:
        for name in names:
            await client.load(name)
        other = _BODY | {"model": names[-1], "max_tokens": BESIDE, "ignore_eos": True, "stream": True}
        async with aclosing(client.stream(other)) as parts:
            await anext(parts)
            return not _differ(base, await _greedy(client, model))
    finally:
        for name in names:
            await client.unload(name)


def _differ(one: tuple[str, float], other: tuple[str, float]) -> bool:
    return one[0] != other[0] or abs(one[1] - other[1]) > SEEN


async def _biased_logprob(client: VllmClient, model: str) -> float:
    """Returns the logprob of a token that a bias makes certain: 0 if logprobs are those of the distribution sampled
    from."""
    _, logprob = await _drawn(client, _BODY | {"model": model, "temperature": 1.0, "logit_bias": {"4": 100.0}})
    return logprob


async def _greedy(client: VllmClient, model: str) -> tuple[str, float]:
    return await _drawn(client, _BODY | {"model": model, "temperature": 0.0})


async def _drawn(client: VllmClient, body: JsonObject) -> tuple[str, float]:
    """Returns one sampled token and its logprob."""
    try:
        logprobs = (await client.complete(body)).choices[0].logprobs
        assert logprobs is not None
        return logprobs.tokens[0], logprobs.token_logprobs[0]
    except (ReplicaRefused, IndexError, AssertionError) as e:
        raise ReplicaUnfit(f"vLLM at {client.url} does not answer as it should: {e}") from None


_BODY: JsonObject = {
    "prompt": [1, 2, 3],
    "max_tokens": 1,
    "top_p": 1.0,
    "top_k": 0,
    "logprobs": 0,
    "return_tokens_as_token_ids": True,
}


def _pack_adapter(module: str, inputs: int, outputs: int, rank: int, strength: float) -> bytes:
    """Makes an adapter as workers send it: a safetensors file is a header and the numbers."""
    target = module.rpartition(".")[2]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": [target]}
    header: JsonObject = {"__metadata__": {PACKED_CONFIG: json.dumps(config)}}
    numbers, data = random.Random(module), b""
    for name, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
        values = array("f", (numbers.uniform(-strength, strength) for _ in range(shape[0] * shape[1]))).tobytes()
        offsets = [len(data), len(data) + len(values)]
        header[f"base_model.model.{module}.{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        data += values
    about = msgspec.json.encode(header)
    about += b" " * (-len(about) % 8)
    return len(about).to_bytes(8, "little") + about + data
