"""Reads a decoder's weights, laid out for its matrix products."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from palestra.model.errors import WeightsError
from palestra.model.loading.layer_spec import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    HeadShape,
    LatentAttentionSpec,
    LayerSpec,
    MambaSpec,
    MlpSpec,
)
from palestra.model.loading.linear_weights import Cut, LinearWeightsReader, Rows, Transposed
from palestra.model.loading.progress import LoadProgress
from palestra.model.loading.quantised_cache import QuantisedCache
from palestra.model.loading.row_share import RowShare
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.tensor_parallel import WHOLE, TensorShard
from palestra.model.loading.weight_files import WeightFiles
from palestra.model.quantised.forms import Form
from palestra.model.quantised.packed import FrozenWeight

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NORMS = {
    "before": {"input": "input_layernorm", "mlp": "post_attention_layernorm"},
    "after": {"mixer_out": "post_attention_layernorm", "mlp_out": "post_feedforward_layernorm"},
    "around": {
        "input": "input_layernorm",
        "mixer_out": "post_attention_layernorm",
        "mlp": "pre_feedforward_layernorm",
        "mlp_out": "post_feedforward_layernorm",
    },
}
"""What files call a layer's norms, by their places."""
HALF_NORM = "norm"
"""The only one of a layer that is one half."""
Parts = Sequence[tuple[str, int]]
"""Projections that share an input, with their output sizes."""


@dataclass(slots=True)
class AttentionWeights:
    qkv: FrozenWeight
    """q (with its gates, where there are some), k and v stacked: one linear layer instead of three."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[q heads + kv heads, head_dim]: one normalisation for both."""
    o: FrozenWeight
    o_bias: Tensor | None
    sinks: Tensor | None = None
    """[heads], float32."""
    row_norms: tuple[Tensor, Tensor] | None = None
    """Those of q and of k where they are normalised over all heads."""
    v_norm: Tensor | None = None
    """Ones, where values are normalised."""


@dataclass(slots=True)
class LatentAttentionWeights:
    compress: FrozenWeight
    """Compressed queries (or queries), compressed keys and values, and the rotated part of keys, stacked."""
    compress_bias: Tensor | None
    q_norm: Tensor | None
    """None, as is `q_up`, where queries are not compressed."""
    q_up: FrozenWeight | None
    kv_norm: Tensor
    keys: Tensor
    """[heads, nope_dim, kv_rank]: from compressed rows to keys."""
    values: Tensor
    """[heads, value_dim, kv_rank]"""
    o: FrozenWeight
    o_bias: Tensor | None


@dataclass(slots=True)
class DeltaNetWeights:
    qkv: FrozenWeight
    z: FrozenWeight | None
    """None where its rows stand among those of `qkv`."""
    ba: Tensor
    """[2 * value heads, hidden]: what becomes beta, and what becomes the decay."""
    conv: Tensor
    """[kernel, channels], float32."""
    neg_a: Tensor
    """-exp(A_log), float32."""
    dt_bias: Tensor
    """float32, as is the norm."""
    norm: Tensor
    out: FrozenWeight


@dataclass(slots=True)
class MambaWeights:
    in_proj: FrozenWeight
    """Gates, x, B, C and time steps, stacked."""
    conv: Tensor
    """[kernel, channels], float32."""
    conv_bias: Tensor | None
    neg_a: Tensor
    """-exp(A_log), float32, as are those below."""
    dt_bias: Tensor
    skip: Tensor
    """[heads]: how much of x goes past the state space."""
    norm: Tensor
    """[groups, size of a group]"""
    out: FrozenWeight


MixerWeights = AttentionWeights | LatentAttentionWeights | DeltaNetWeights | MambaWeights


@dataclass(slots=True)
class MlpWeights:
    gate_up: FrozenWeight
    """Without a gate, `up` alone."""
    gate_up_bias: Tensor | None
    down: FrozenWeight
    down_bias: Tensor | None


@dataclass(slots=True)
class ExpertsWeights:
    router: Tensor
    """[experts, hidden]"""
    gate_up: FrozenWeight
    """[experts, 2 * size, hidden]; without a gate, [experts, size, hidden]."""
    down: FrozenWeight
    """[experts, hidden, size]"""
    latent_in: FrozenWeight | None = None
    """[latent, hidden], as `latent_out` the other way: where experts work in another width."""
    latent_out: FrozenWeight | None = None
    shared: MlpWeights | None = None
    shared_gate: Tensor | None = None
    """[1, hidden]"""
    router_bias: Tensor | None = None
    """[experts], float32."""
    gate_up_bias: Tensor | None = None
    """[experts, 2 * size]"""
    down_bias: Tensor | None = None
    """[experts, hidden]"""
    expert_scale: Tensor | None = None
    """[experts], float32: what multiplies the weight of each."""


@dataclass(slots=True)
class ParallelWeights:
    """A dense network and experts side by side; norms are float32."""

    dense: MlpWeights
    dense_norm: Tensor
    dense_out_norm: Tensor
    experts: ExpertsWeights
    experts_norm: Tensor
    experts_out_norm: Tensor
    router_norm: Tensor
    """With the router's own factors, and the root of the width, in it."""


@dataclass(slots=True)
class LayerEndWeights:
    scalar: float
    gate: FrozenWeight | None = None
    """[width, hidden], as `projection` the other way: what takes in the layer's own input, if there is one."""
    projection: FrozenWeight | None = None
    norm: Tensor | None = None


@dataclass(slots=True)
class PerLayerWeights:
    embedding: Tensor
    """[vocabulary, layers * width]"""
    projection: Tensor
    """[layers * width, hidden]"""
    norm: Tensor


@dataclass(slots=True)
class LayerWeights:
    input_norm: Tensor | None
    mixer: MixerWeights | None
    mixer_out_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp: MlpWeights | ExpertsWeights | ParallelWeights | None
    mlp_out_norm: Tensor | None
    end: LayerEndWeights | None = None


@dataclass(slots=True)
class DecoderWeights:
    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    unembedding: Tensor
    """The embedding itself when tied."""
    per_layer: PerLayerWeights | None = None
    """Where layers have inputs of their own."""


def read_weights(
    folder: str | Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    form: Form | None = None,
    share: RowShare | None = None,
    tensor: TensorShard = WHOLE,
) -> DecoderWeights:
    """Reads the weights. With a form, those of linear layers are kept in it; embeddings, norms and biases keep the
    dtype. With a share, only its rows of the layers' weights are read. With `tensor`, those that its rank computes."""
    device, meta = torch.device(device), torch.device("meta")
    with WeightFiles(Path(folder)) as files:
        # The headers first: an error in the last layer is raised before the first one is read.
        lay_out(files, spec, dtype, meta)
        paths = [files.folder / file for file in files.files]
        files.progress = LoadProgress(sum(path.stat().st_size for path in paths))
        cache = None if form is None else QuantisedCache.of(paths, form)
        weights = lay_out(files, spec, dtype, device, form, cache, share, tensor)
        files.progress.end()
        for packing, count in files.unpacked.items():
            log.info("weights_dequantised folder=%s from=%s tensors=%d", folder, packing, count)
        if form is not None:
            log.info("weights_quantised to=%s from_cache=%d", form.name, cache.found if cache else 0)
        return weights


def lay_out(
    files: WeightFiles,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    form: Form | None = None,
    cache: QuantisedCache | None = None,
    share: RowShare | None = None,
    tensor: TensorShard = WHOLE,
) -> DecoderWeights:
    """Each weight in its final place and type. On the device `meta`, only the files' headers are checked."""
    linears = LinearWeightsReader(files, dtype, device, form, cache, share, tensor)
    return _Reader(files, spec, dtype, device, linears).decoder()


# Headers are checked on the device `meta`, where a sum or a torch.cat would take seconds to import torch's compiler.


def joined(parts: list[Tensor]) -> Tensor:
    """One below the other. Not by torch.cat on the device `meta`: arithmetic there imports torch's compiler (2 s)."""
    return parts[0] if parts[0].is_meta else torch.cat(parts)


def changed(weight: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return weight if weight.is_meta else change(weight)


def by_halves(rows: Tensor) -> Tensor:
    """Rows of gate and up that stand by turns, [..., 2 * size, n], as all of gate before all of up."""
    return rows.unflatten(-2, (-1, 2)).transpose(-3, -2).flatten(-3, -2)


def by_turns(rows: Tensor) -> Tensor:
    """The way back."""
    return rows.unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2)


class _Reader:
    def __init__(
        self,
        files: WeightFiles,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        linears: LinearWeightsReader,
    ):
        self.files, self.spec, self.dtype, self.device, self.prefix = files, spec, dtype, device, files.prefix
        self.linears, self.tensor = linears, linears.tensor

    def decoder(self) -> DecoderWeights:
        spec = self.spec
        size = (spec.vocab_size, spec.hidden_size)
        embedding = self.get(self.files.embedding, *size)
        return DecoderWeights(
            embedding=embedding,
            layers=[self.layer(n) for n in range(spec.n_layers)],
            norm=self.last_norm(self.files.last_norm, spec.hidden_size),
            unembedding=embedding if spec.tie_embeddings else self.get(self.files.head, *size),
            per_layer=self.per_layer(),
        )

    def per_layer(self) -> PerLayerWeights | None:
        spec, width = self.spec, max(layer.per_layer_input for layer in self.spec.layers)
        if not width:
            return None
        rows = spec.n_layers * width
        return PerLayerWeights(
            embedding=self.get(f"{self.prefix}embed_tokens_per_layer.weight", spec.vocab_size, rows),
            projection=self.get(f"{self.prefix}per_layer_model_projection.weight", rows, spec.hidden_size),
            norm=self.norm(f"{self.prefix}per_layer_projection_norm.weight", width),
        )

    def layer(self, n: int) -> LayerWeights:
        h, layer, name = self.spec.hidden_size, self.spec.layers[n], f"{self.prefix}layers.{n}"
        places = NORMS[layer.norms]
        if layer.is_half:
            places = {"mlp" if layer.mixer is None else "input": HALF_NORM}
        elif isinstance(layer.mlp, ExpertsSpec) and layer.mlp.beside:
            places = {place: norm for place, norm in places.items() if place != "mlp"}  # each has one of its own
        norms = {place: self.norm(f"{name}.{norm}.weight", h) for place, norm in places.items()}
        return LayerWeights(
            input_norm=norms.get("input"),
            mixer=self.mixer(name, n),
            mixer_out_norm=norms.get("mixer_out"),
            mlp_norm=norms.get("mlp"),
            mlp=self.mlp(name, layer),
            mlp_out_norm=norms.get("mlp_out"),
            end=self.end(name, layer),
        )

    def end(self, name: str, layer: LayerSpec) -> LayerEndWeights | None:
        h, width = self.spec.hidden_size, layer.per_layer_input
        if not layer.has_scalar:
            return None
        stored = self.get(f"{name}.layer_scalar", 1)
        scalar = 1.0 if stored.is_meta else stored.item()
        if not width:
            return LayerEndWeights(scalar)
        return LayerEndWeights(
            scalar,
            gate=self.linear(f"{name}.per_layer_input_gate.weight", width, h),
            projection=self.linear(f"{name}.per_layer_projection.weight", h, width),
            norm=self.norm(f"{name}.post_per_layer_input_norm.weight", h),
        )

    def mixer(self, name: str, n: int) -> MixerWeights | None:
        layer = self.spec.layers[n]
        match layer.mixer:
            case AttentionSpec() as mixer:
                return self.attention(f"{name}.{layer.module('self_attn')}", mixer, self.spec.heads[n])
            case LatentAttentionSpec() as mixer:
                return self.latent_attention(f"{name}.self_attn", mixer)
            case DeltaNetSpec() as mixer:
                return self.delta_net(f"{name}.linear_attn", mixer)
            case MambaSpec() as mixer:
                return self.mamba(f"{name}.{layer.module('mamba')}", mixer)
            case None:
                return None

    def mlp(self, name: str, layer: LayerSpec) -> MlpWeights | ExpertsWeights | ParallelWeights | None:
        inner = f"{name}.{layer.module('mlp')}"
        match layer.mlp:
            case MlpSpec() as mlp:
                return self.dense(inner, self.spec.dense_size(mlp), mlp)
            case ExpertsSpec(beside=MlpSpec() as beside) as experts:
                return self.parallel(name, beside, experts)
            case ExpertsSpec() as experts:
                return self.experts(inner, experts)
            case None:
                return None

    def latent_attention(self, name: str, m: LatentAttentionSpec) -> LatentAttentionWeights:
        heads, h = self.spec.n_heads, self.spec.hidden_size
        q = ("q_proj", heads * m.qk_dim) if m.q_rank is None else ("q_a_proj", m.q_rank)
        compress = [q, ("kv_a_proj_with_mqa", m.row_size)]
        kv_up = self.get(f"{name}.kv_b_proj.weight", heads * (m.nope_dim + m.value_dim), m.kv_rank)
        keys, values = kv_up.unflatten(0, (heads, -1)).split([m.nope_dim, m.value_dim], 1)
        return LatentAttentionWeights(
            compress=self.linears.read([(f"{name}.{part}.weight", n) for part, n in compress], h),
            compress_bias=self.biases(name, compress, m.has_bias),
            q_norm=None if m.q_rank is None else self.norm(f"{name}.q_a_layernorm.weight", m.q_rank),
            q_up=None if m.q_rank is None else self.linear(f"{name}.q_b_proj.weight", heads * m.qk_dim, m.q_rank),
            kv_norm=self.norm(f"{name}.kv_a_layernorm.weight", m.kv_rank),
            keys=keys.contiguous(),
            values=values.contiguous(),
            o=self.linear(f"{name}.o_proj.weight", h, heads * m.value_dim),
            o_bias=self.biases(name, [("o_proj", h)], m.has_bias),
        )

    def attention(self, name: str, mixer: AttentionSpec, heads: HeadShape) -> AttentionWeights:
        h, q, kv = self.spec.hidden_size, heads.q_size, heads.kv_size
        qkv, own = mixer.projections(heads), self.tensor.heads(heads)
        qk_norm = row_norms = None
        if mixer.qk_norm == "head":
            counts = {"q": own.n_heads} | ({} if mixer.kv_source is not None else {"k": own.n_kv_heads})
            factors = {"q": mixer.query_factor(heads) if mixer.is_scale_in_norm else 1.0, "k": 1.0}
            norms = [self.norm(f"{name}.{x}_norm.weight", heads.head_dim, factors[x]) for x in counts]
            qk_norm = joined([norm.expand(n, -1) for norm, n in zip(norms, counts.values(), strict=True)])
        elif mixer.qk_norm == "row":
            row_norms = self.norm(f"{name}.q_norm.weight", q), self.norm(f"{name}.k_norm.weight", kv)
        return AttentionWeights(
            qkv=self.linears.read([(f"{name}.{part}.weight", n) for part, n in qkv], h, "outputs"),
            qkv_bias=self.biases(name, qkv, mixer.qkv_bias, "outputs"),
            qk_norm=qk_norm,
            o=self.linear(f"{name}.o_proj.weight", h, q, "inputs"),
            o_bias=self.biases(name, [("o_proj", h)], mixer.o_bias, "inputs"),
            sinks=self.part(f"{name}.sinks", heads.n_heads, dtype=torch.float32) if mixer.has_sinks else None,
            row_norms=row_norms,
            v_norm=torch.ones(heads.head_dim, device=self.device) if mixer.has_value_norm else None,
        )

    def delta_net(self, name: str, mixer: DeltaNetSpec) -> DeltaNetWeights:
        h, heads, values = self.spec.hidden_size, mixer.n_value_heads, mixer.value_size
        if mixer.is_interleaved:
            qkv, z = self.linear(f"{name}.in_proj_qkvz.weight", mixer.conv_size + values, h), None
            by_key_head = self.get(f"{name}.in_proj_ba.weight", 2 * heads, h).unflatten(0, (mixer.n_key_heads, 2, -1))
            ba = by_key_head.transpose(0, 1).flatten(0, 2).contiguous()
        else:
            qkv = self.linear(f"{name}.in_proj_qkv.weight", mixer.conv_size, h)
            z = self.linear(f"{name}.in_proj_z.weight", values, h)
            ba = joined([self.get(f"{name}.in_proj_{x}.weight", heads, h) for x in "ba"])
        conv = self.get(f"{name}.conv1d.weight", mixer.conv_size, 1, mixer.conv_kernel, dtype=torch.float32)
        return DeltaNetWeights(
            qkv=qkv,
            z=z,
            ba=ba,
            conv=conv[:, 0].T.contiguous(),
            neg_a=changed(self.get(f"{name}.A_log", heads, dtype=torch.float32), lambda a: -a.exp()),
            dt_bias=self.get(f"{name}.dt_bias", heads, dtype=torch.float32),
            norm=self.get(f"{name}.norm.weight", mixer.value_dim, dtype=torch.float32),
            out=self.linear(f"{name}.out_proj.weight", h, values),
        )

    def mamba(self, name: str, m: MambaSpec) -> MambaWeights:
        h, wide = self.spec.hidden_size, torch.float32
        conv = self.get(f"{name}.conv1d.weight", m.conv_size, 1, m.conv_kernel, dtype=wide)
        return MambaWeights(
            in_proj=self.linear(f"{name}.in_proj.weight", m.in_size, h),
            conv=conv[:, 0].T.contiguous(),
            conv_bias=self.get(f"{name}.conv1d.bias", m.conv_size, dtype=wide) if m.has_conv_bias else None,
            neg_a=changed(self.get(f"{name}.A_log", m.n_heads, dtype=wide), lambda a: -a.exp()),
            dt_bias=self.get(f"{name}.dt_bias", m.n_heads, dtype=wide),
            skip=self.get(f"{name}.D", m.n_heads, dtype=wide),
            norm=self.get(f"{name}.norm.weight", m.inner_size, dtype=wide).unflatten(0, (m.n_groups, -1)),
            out=self.linear(f"{name}.out_proj.weight", h, m.inner_size),
        )

    def dense(self, name: str, size: int, mlp: MlpSpec) -> MlpWeights:
        h, gate_up = self.spec.hidden_size, [("gate_proj", size), ("up_proj", size)]
        if not mlp.is_gated:
            gate_up = [("up_proj", size)]
        elif mlp.is_fused:
            gate_up = [("gate_up_proj", 2 * size)]
        return MlpWeights(
            gate_up=self.linears.read([(f"{name}.{part}.weight", n) for part, n in gate_up], h, "outputs"),
            gate_up_bias=self.biases(name, gate_up, mlp.has_bias, "outputs"),
            down=self.linear(f"{name}.down_proj.weight", h, size, "inputs"),
            down_bias=self.biases(name, [("down_proj", h)], mlp.has_bias, "inputs"),
        )

    def experts(self, name: str, mlp: ExpertsSpec) -> ExpertsWeights:
        h, is_shared, latent = self.spec.hidden_size, bool(mlp.shared_size), mlp.latent_size
        shared = MlpSpec(activation=mlp.activation)
        if mlp.is_interleaved:
            return self.interleaved_experts(name, mlp)
        gate_up, down = self.expert_stacks(f"{name}.experts", mlp)
        return ExpertsWeights(
            router=self.get(f"{name}.gate.weight", mlp.n_experts, h),
            router_bias=self.get(f"{name}.gate.e_score_correction_bias", mlp.n_experts, dtype=torch.float32)
            if mlp.router == "sigmoid"
            else None,
            gate_up=gate_up,
            down=down,
            latent_in=None if latent is None else self.linear(f"{name}.fc1_latent_proj.weight", latent, h),
            latent_out=None if latent is None else self.linear(f"{name}.fc2_latent_proj.weight", h, latent),
            shared=self.dense(f"{name}.{mlp.shared_name}", mlp.shared_size, shared) if is_shared else None,
            shared_gate=self.get(f"{name}.shared_expert_gate.weight", 1, h)
            if is_shared and mlp.is_shared_gated
            else None,
        )

    def parallel(self, name: str, beside: MlpSpec, mlp: ExpertsSpec) -> ParallelWeights:
        h, n = self.spec.hidden_size, mlp.n_experts
        gate_up, down = self.expert_stacks(f"{name}.experts", mlp)
        router = self.get(f"{name}.router.scale", h, dtype=torch.float32)
        return ParallelWeights(
            dense=self.dense(f"{name}.mlp", self.spec.dense_size(beside), beside),
            dense_norm=self.norm(f"{name}.pre_feedforward_layernorm.weight", h),
            dense_out_norm=self.norm(f"{name}.post_feedforward_layernorm_1.weight", h),
            experts=ExpertsWeights(
                router=self.get(f"{name}.router.proj.weight", n, h),
                gate_up=gate_up,
                down=down,
                expert_scale=self.get(f"{name}.router.per_expert_scale", n, dtype=torch.float32),
            ),
            experts_norm=self.norm(f"{name}.pre_feedforward_layernorm_2.weight", h),
            experts_out_norm=self.norm(f"{name}.post_feedforward_layernorm_2.weight", h),
            router_norm=changed(router, lambda w: w * h**-0.5),
        )

    def interleaved_experts(self, name: str, mlp: ExpertsSpec) -> ExpertsWeights:
        n, h, i = mlp.n_experts, self.spec.hidden_size, mlp.size
        gate_up, down = f"{name}.experts.gate_up_proj", f"{name}.experts.down_proj"
        return ExpertsWeights(
            router=self.get(f"{name}.router.weight", n, h),
            router_bias=self.get(f"{name}.router.bias", n, dtype=torch.float32),
            gate_up=self.linears.read_stack(
                [(gate_up, (n, 2 * i))], h, n, Transposed((n, h, 2 * i), by_halves), "outputs", projections=2
            ),
            gate_up_bias=self.halves_part(by_halves(self.get(f"{gate_up}_bias", n, 2 * i)[..., None]).squeeze(-1)),
            down=self.linears.read_stack([(down, (n, h))], i, n, Transposed((n, i, h)), "inputs"),
            down_bias=self.get(f"{down}_bias", n, h) if self.tensor.rank == 0 else None,
        )

    def expert_stacks(self, name: str, mlp: ExpertsSpec) -> tuple[FrozenWeight, FrozenWeight]:
        """Files have two matrices for all experts, or those of each by themselves."""
        n, h, i = mlp.n_experts, mlp.latent_size or self.spec.hidden_size, mlp.size
        parts = ("gate", "up") if mlp.is_gated else ("up",)
        gate_up: Rows = [(f"{name}.{'_'.join(parts)}_proj", (n, len(parts) * i))]
        down: Rows = [(f"{name}.down_proj", (n, h))]
        projections = len(parts)
        outputs = len(parts) * i
        if mlp.may_be_transposed and self._is_transposed(gate_up[0][0], (n, outputs, h)):
            return (
                self.linears.read_stack(gate_up, h, n, Transposed((n, h, outputs)), "outputs", projections=projections),
                self.linears.read_stack(down, i, n, Transposed((n, i, h)), "inputs"),
            )
        if gate_up[0][0] not in self.files:
            if f"{name}.{n}.down_proj.weight" in self.files:
                raise WeightsError(
                    f"{self.files.folder}: {name} has more experts than the {n} that config.json asks for"
                )
            gate_up, projections = [(f"{name}.{e}.{part}_proj.weight", i) for e in range(n) for part in parts], 1
            down = [(f"{name}.{e}.down_proj.weight", h) for e in range(n)]
        return (
            self.linears.read_stack(gate_up, h, n, cut="outputs", projections=projections),
            self.linears.read_stack(down, i, n, cut="inputs"),
        )

    def _is_transposed(self, name: str, shape: tuple[int, int, int]) -> bool:
        """Whether files have the last two dimensions the other way around. Square ones are taken as they are."""
        n, rows, columns = shape
        return name in self.files and rows != columns and self.files.shape(name) == (n, columns, rows)

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        place = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.files.read_into(name, place)
        return place

    def part(self, name: str, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the part that belongs to this rank's outputs."""
        whole = self.get(name, size, dtype=dtype)
        return whole if self.tensor.ranks == 1 else whole[self.tensor.own(size)].clone()

    def halves_part(self, bias: Tensor) -> Tensor:
        """The same of gate and up of each expert, [experts, 2 * size]."""
        if self.tensor.ranks == 1:
            return bias
        halves = bias.unflatten(1, (2, -1))
        return halves[..., self.tensor.own(halves.shape[-1])].flatten(1)

    def norm(self, name: str, size: int, factor: float = 1.0) -> Tensor:
        """A norm's factors: in float32 where the family multiplies before it rounds, and where one is added or they are
        multiplied, since the result has more digits than a half holds."""
        if self.spec.has_offset_norms:
            return changed(self.get(name, size, dtype=torch.float32), lambda w: w + 1.0)
        if factor != 1.0:
            return changed(self.get(name, size, dtype=torch.float32), lambda w: w * factor)
        return self.get(name, size, dtype=torch.float32 if self.spec.has_wide_norms else None)

    def last_norm(self, name: str, size: int) -> Tensor:
        """The norm before the unembedding. Its factors include that of the logits."""
        factor = self.spec.multipliers.logits
        return self.norm(name, size) if factor == 1.0 else changed(self.norm(name, size).float(), lambda w: w * factor)

    def linear(self, name: str, outputs: int, inputs: int, cut: Cut | None = None) -> FrozenWeight:
        return self.linears.read([(name, outputs)], inputs, cut)

    def biases(self, prefix: str, parts: Parts, present: bool, cut: Cut | None = None) -> Tensor | None:
        """Returns the biases; where ranks add up what they return, only one of them adds the bias."""
        if not present or (cut == "inputs" and self.tensor.rank > 0):
            return None
        read = self.part if cut == "outputs" else self.get
        return joined([read(f"{prefix}.{part}.bias", size) for part, size in parts])
