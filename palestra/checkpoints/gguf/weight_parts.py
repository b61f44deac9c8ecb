"""The parameters of a GGUF file that one of a Hugging Face folder becomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from torch import Tensor

from palestra.checkpoints.gguf.families import GgufFamily
from palestra.checkpoints.gguf.weight_order import column_order, row_order
from palestra.model.loading.layer_spec import LatentAttentionSpec, MambaSpec
from palestra.model.loading.spec import ModelSpec

_ALL_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?")
_LAYER = re.compile(r".*\.layers\.(\d+)\.")
_HALVES = ("gate_proj", "up_proj")
Change = Callable[[Tensor], Tensor]
"""What is done to the numbers of a folder; its result has the shape that it has for every tensor of that shape."""


def weight_parts(plain: str, spec: ModelSpec, family: GgufFamily) -> Iterator[tuple[str, Change]]:
    """By their names as a folder would have them."""
    if found := _ALL_EXPERTS.fullmatch(plain):
        yield from _expert_parts(found[1], found[2], found[3] or "", spec, family)
    elif plain.endswith(".kv_b_proj.weight"):
        yield from _latent_parts(plain, spec)
    else:
        kind = ".weight" if plain.endswith(".weight") else ".bias" if plain.endswith(".bias") else ""
        module = plain.removesuffix(kind)
        columns = column_order(module, spec)
        for part, rows in row_order(module, spec, family):
            yield f"{part}{kind}", lambda weight, rows=rows: _arranged(plain, weight, rows, columns, spec)


def _expert_parts(head: str, leaf: str, kind: str, spec: ModelSpec, family: GgufFamily) -> Iterator[tuple[str, Change]]:
    """Yields the parts of a tensor that has all experts of a layer; gates and ups are rows of one matrix."""
    experts = next(iter(spec.experts.values()))
    is_interleaved, outputs = experts.is_interleaved, 2 * experts.size if leaf == "gate_up_proj" else spec.hidden_size

    def rows(stack: Tensor) -> Tensor:
        """Some files have matrices, not biases, transposed: always gpt-oss's, and of others newer files."""
        may_be = is_interleaved or (experts.may_be_transposed and stack.shape[1] != outputs)
        return stack.mT if may_be and not kind else stack

    if leaf == "down_proj" or family.is_gemma4:
        yield f"{head}.{leaf}{kind}", rows
        return
    for half, name in enumerate(_HALVES):
        if is_interleaved:
            yield f"{head}.{name}{kind}", lambda stack, half=half: rows(stack)[:, half::2]
        else:
            yield f"{head}.{name}{kind}", lambda stack, half=half: rows(stack).chunk(2, dim=1)[half]


def _latent_parts(plain: str, spec: ModelSpec) -> Iterator[tuple[str, Change]]:
    """What makes keys and values of latent rows, by head: [heads, rank, key] and [heads, value, rank]."""
    mixer = _mixer(plain, spec)
    assert isinstance(mixer, LatentAttentionSpec)
    head = plain.removesuffix("kv_b_proj.weight")
    shape = (spec.n_heads, mixer.nope_dim + mixer.value_dim)
    yield f"{head}k_b_proj.weight", lambda weight: weight.unflatten(0, shape)[:, : mixer.nope_dim].mT
    yield f"{head}v_b_proj.weight", lambda weight: weight.unflatten(0, shape)[:, mixer.nope_dim :]


def _arranged(plain: str, weight: Tensor, rows: Tensor | None, columns: Tensor | None, spec: ModelSpec) -> Tensor:
    if rows is not None:
        weight = weight[rows]
    if columns is not None:
        weight = weight[:, columns]
    mixer = _mixer(plain, spec)
    match plain.rpartition("layers.")[2].partition(".")[2].removesuffix(".weight"):
        case "linear_attn.A_log":
            return -weight.float().exp()
        case "linear_attn.conv1d" | "mixer.conv1d":
            return weight.squeeze(1)
        case "linear_attn.norm":
            return weight
        case "mixer.A_log":
            return -weight.float().exp()[:, None]
        case "mixer.D":
            return weight[:, None]
        case "mixer.norm" if isinstance(mixer, MambaSpec):
            return weight.unflatten(0, (mixer.n_groups, -1))
        case "mlp.shared_expert_gate":
            return weight[0]
    return weight.float() + 1 if spec.has_offset_norms and plain.endswith("norm.weight") else weight


def _mixer(plain: str, spec: ModelSpec) -> object:
    found = _LAYER.match(plain)
    return spec.layers[int(found[1])].mixer if found else None
