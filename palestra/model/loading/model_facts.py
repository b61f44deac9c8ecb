"""Facts about a model folder, and estimates that follow from them, for `palestra model info`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from palestra.model.errors import TokenizerError, WeightsError
from palestra.model.loading.layer_spec import SLIDING, UNROTATED, AttentionSpec, ExpertsSpec, MlpSpec, Multipliers
from palestra.model.loading.parameter_counts import count_idle_parameters
from palestra.model.loading.spec import ModelSpec
from palestra.model.lora.layout import Layout
from palestra.types import LoraConfig

LORA_RANK = 32
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
ADAPTER_BYTES = 4  # adapters are kept in float32
TRAINING_COPIES = 4  # weight, gradient, and the two moments of Adam


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    layers: int
    experts: int
    per_token: int
    size: int
    shared_size: int
    """Width of the expert that every token visits; 0 without one."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    architecture: str
    family: str
    parameters: int
    active_parameters: int
    """Those that one token needs: without the experts it does not visit."""
    dtype: str
    layers: int
    layer_kinds: dict[str, int]
    """How many layers there are of each kind."""
    mechanisms: list[str]
    """What the family has beside Llama's plain layers."""
    hidden_size: int
    intermediate_size: int
    experts: ExpertFacts | None
    """None where all layers are dense."""
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    sliding_window: int | None
    rope_type: str
    rope_theta: float
    vocab_size: int
    tied_embeddings: bool
    tokenizer_vocab: int | None
    eos_token_ids: list[int]
    has_chat_template: bool
    size_bytes: int
    serve_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_sequence: int
    """Recurrent states; 0 for models without."""
    lora_modules: list[str]
    """The projections that an adapter trains."""
    lora_parameters: int
    lora_bytes: int
    lora_training_bytes: int


def gather_facts(folder: Path) -> ModelFacts:
    spec = ModelSpec.from_folder(folder)
    parameters = sum(_parameters_in(file, spec.n_layers) for file in _weight_files(folder))
    item_bytes = DTYPE_BYTES.get(spec.dtype, 4)
    kv_bytes = spec.kv_numbers_per_token * item_bytes
    state_bytes = spec.state_bytes(item_bytes)
    layout = Layout.of(spec, LoraConfig(rank=LORA_RANK))
    lora = layout.size
    return ModelFacts(
        architecture=spec.architecture,
        family=spec.family,
        parameters=parameters,
        active_parameters=parameters - count_idle_parameters(spec),
        dtype=spec.dtype,
        layers=spec.n_layers,
        layer_kinds=_layer_kinds(spec),
        mechanisms=_mechanisms(spec),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        experts=_expert_facts(spec),
        heads=spec.n_heads,
        kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        max_positions=spec.max_positions,
        sliding_window=spec.sliding_window,
        rope_type=spec.rope.type if spec.rope.dim else "none",
        rope_theta=spec.rope.theta,
        vocab_size=spec.vocab_size,
        tied_embeddings=spec.tie_embeddings,
        tokenizer_vocab=_tokenizer_vocab(folder / "tokenizer.json"),
        eos_token_ids=list(spec.eos_token_ids),
        has_chat_template=_has_chat_template(folder),
        size_bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        serve_bytes=parameters * item_bytes + kv_bytes * spec.max_positions + state_bytes,
        kv_bytes_per_token=kv_bytes,
        state_bytes_per_sequence=state_bytes,
        lora_modules=_modules(layout),
        lora_parameters=lora,
        lora_bytes=lora * ADAPTER_BYTES,
        lora_training_bytes=lora * ADAPTER_BYTES * TRAINING_COPIES,
    )


def _mechanisms(spec: ModelSpec) -> list[str]:
    attention = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    activations = {layer.mlp.activation for layer in spec.layers if layer.mlp is not None}
    has = {
        "mixture of experts": bool(spec.experts),
        "sigmoid router": any(experts.router == "sigmoid" for experts in spec.experts.values()),
        "latent attention": spec.kv_sides == 1,
        "gated delta nets": bool(spec.delta_nets),
        "Mamba-2": bool(spec.mambas),
        "experts of a width of their own": any(experts.latent_size for experts in spec.experts.values()),
        "sliding windows": spec.sliding_window is not None,
        "norms on queries and keys": any(mixer.qk_norm for mixer in attention),
        "attention sinks": spec.has_sinks,
        "gated attention": any(mixer.is_gated for mixer in attention),
        "positions in some layers only": UNROTATED in spec.ropes and len(spec.ropes) > 1,
        "attention without positions": spec.rope.dim == 0,
        "queries scaled by position": any(rope.query_beta for rope in spec.ropes.values()),
        "multipliers on embeddings, residuals or logits": spec.multipliers != Multipliers(),
        "norms behind each half of a layer": any(layer.norms != "before" for layer in spec.layers),
        "heads of several sizes": len({spec.heads[n] for n in spec.attention_layers}) > 1,
        "layers that read another one's keys": bool(spec.kv_sources),
        "norms on values": any(mixer.has_value_norm for mixer in attention),
        "values that are keys": any(mixer.values_are_keys for mixer in attention),
        "inputs of each layer's own": any(layer.per_layer_input for layer in spec.layers),
        "experts beside a dense network": any(experts.beside for experts in spec.experts.values()),
        "capped logits": spec.multipliers.logit_cap is not None,
        "gelu": "gelu_tanh" in activations,
        "squared relu without a gate": "relu2" in activations,
        "a rope of its own for windows": SLIDING in spec.ropes,
        "biases": any(mixer.qkv_bias or mixer.o_bias for mixer in attention),
        "partial rope": spec.kv_sides == 2 and 0 < spec.rope.dim < spec.head_dim,
        f"{spec.rope.type} rope scaling": spec.rope.type != "default",
        "norms that multiply by 1 + w": spec.has_offset_norms,
        "tied embeddings": spec.tie_embeddings,
        "a vision tower": spec.tower is not None,
    }
    return [name for name, is_there in has.items() if is_there]


def _modules(layout: Layout) -> list[str]:
    names = (part.module.rsplit(".", 1)[-1] for site in layout.sites.values() for part in site.parts)
    return list(dict.fromkeys(names))


def _expert_facts(spec: ModelSpec) -> ExpertFacts | None:
    if not spec.experts:
        return None
    mlp = next(iter(spec.experts.values()))
    return ExpertFacts(len(spec.experts), mlp.n_experts, mlp.per_token, mlp.size, mlp.shared_size)


def _layer_kinds(spec: ModelSpec) -> dict[str, int]:
    kind = "attention" if spec.kv_sides == 2 else "latent attention"
    windowed = sum(window is not None for window in spec.windows)
    counts = {
        kind: len(spec.attention_layers) + len(spec.kv_sources) - windowed,
        "windowed attention": windowed,
        "gated delta net": len(spec.delta_nets),
        "Mamba-2": len(spec.mambas),
        "dense": sum(layer.mixer is None and isinstance(layer.mlp, MlpSpec) for layer in spec.layers),
        "experts": sum(layer.mixer is None and isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers),
    }
    return {kind: n for kind, n in counts.items() if n}


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with _laid_out_as_expected(index, WeightsError):
            return sorted({folder / name for name in _read_json(index, WeightsError)["weight_map"].values()})
    return [folder / "model.safetensors"]


def _parameters_in(file: Path, n_layers: int) -> int:
    """Number of parameters in a safetensors file, from its header alone: eight bytes of length, then JSON."""
    if not file.is_file():
        raise WeightsError(f"{file}: no such file; the model folder is incomplete, copy it again")
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise WeightsError(f"{file}: cut short or not a safetensors file; copy it again")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise WeightsError(f"{file}: not a safetensors file; copy it again") from None
    with _laid_out_as_expected(file, WeightsError):
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if _is_of_text_model(name, n_layers))


def _is_of_text_model(name: str, n_layers: int) -> bool:
    """Whether a tensor belongs to the text model, and not to what is published beside it: a vision tower, layers that
    predict several tokens at once, which may be numbered as if they were more of the others."""
    number = re.search(r"\blayers\.(\d+)\.", name)
    if number is not None and int(number[1]) >= n_layers:
        return False
    others = ("__metadata__", "mtp.", "vision_tower.", "audio_tower.", "multi_modal_projector.", "embed_vision.")
    others += ("embed_audio.",)
    return not name.removeprefix("model.").startswith(others) and "visual." not in name


def _tokenizer_vocab(file: Path) -> int | None:
    if not file.is_file():
        return None
    content = _read_json(file, TokenizerError)
    with _laid_out_as_expected(file, TokenizerError):
        vocab = content["model"]["vocab"]  # a list of pieces in Unigram models
        ids = set(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
        return len(ids | {token["id"] for token in content.get("added_tokens", [])})


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and "chat_template" in _read_json(config, TokenizerError)


@contextmanager
def _laid_out_as_expected(file: Path, kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        raise kind(f"{file}: not laid out as expected ({error!r}); copy the file again") from None


def _read_json(file: Path, kind: type[Exception]) -> dict:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise kind(f"{file}: not valid JSON ({error}); copy the file again") from None
