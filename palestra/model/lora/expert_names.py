"""Names of experts' matrices in adapter files: Tinker's form, and two of PEFT's.

Tinker's (and ours, by default)    w1 (gate), w3 (up), w2 (down): A [n, rank, in], B [n, out, rank] of n experts, with 1
                                   instead of n where they share a matrix
PEFT's, of all experts             A [n * rank, in], the expert slowest; B [out, rank * n], the expert fastest. Gate and
                                   up are one parameter: written with twice the rank, also read with once
PEFT's, of single experts          A [rank, in], B [out, rank]
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from palestra.model.errors import AdapterError
from palestra.model.loading.weights import by_halves, by_turns
from palestra.model.lora.layout import Layout

Matrices = dict[str, Tensor]
GATE_UP, UP, DOWN = "experts.gate_up_proj", "experts.up_proj", "experts.down_proj"
"""Parameters as PEFT's `target_parameters` name them; the second one without a gate."""
PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
UNGATED_PARTS = {"up_proj": "w1", "down_proj": "w2"}
_OWN = re.compile(r"(.*\.experts)\.w[123]\.lora_[AB]\.weight")
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.lora_([AB])\.weight")
_STACKED = re.compile(r"(.*\.experts)\.(base_layer\.)?lora_A\.weight")


def expert_parts(layout: Layout) -> dict[str, str]:
    """Tinker's name for each matrix of an expert."""
    return PARTS if layout.are_experts_gated else UNGATED_PARTS


def join_experts(matrices: Mapping[str, Tensor], layout: Layout) -> Matrices:
    """Joins experts for PEFT: gate and up as one parameter of twice the rank. What experts share, each of them gets a
    copy of."""
    joined = {key: t for key, t in matrices.items() if not _OWN.fullmatch(key)}
    for head in dict.fromkeys(found[1] for key in matrices if (found := _OWN.fullmatch(key))):
        up_a, up_b = _each(matrices, f"{head}.w1")
        if layout.are_experts_gated:
            up_a, up_b = _join_gate(up_a, up_b, *_each(matrices, f"{head}.w3"))
        if layout.is_interleaved:
            up_b = by_turns(up_b)
        joined |= _stack(f"{head}.base_layer", up_a, up_b)
        joined |= _stack(head, *_each(matrices, f"{head}.w2"))
    return joined


def _join_gate(gate_a: Tensor, gate_b: Tensor, up_a: Tensor, up_b: Tensor) -> tuple[Tensor, Tensor]:
    off = torch.zeros_like(gate_b)
    return torch.cat([gate_a, up_a], 1), torch.cat([torch.cat([gate_b, off], 2), torch.cat([off, up_b], 2)], 1)


def split_experts(stored: Matrices, layout: Layout) -> None:
    """The way back, in place."""
    shapes = {key: t.shape for key, t in layout.matrices(torch.empty(layout.size, device="meta")).items()}
    for key in [key for key in stored if _SINGLE.fullmatch(key)]:
        _collect(stored, key, shapes, expert_parts(layout))
    for key in [key for key in stored if _STACKED.fullmatch(key)]:
        _unstack(stored, key, shapes, layout)
    for key in [key for key in stored if _OWN.fullmatch(key)]:
        tensor, shape = stored[key], shapes.get(key)
        if shape is not None and shape[0] == 1 < len(tensor):
            if not (tensor == tensor[:1]).all():
                raise AdapterError(f"{key} differs between experts, but in this adapter they share it")
            stored[key] = tensor[:1]


def _each(matrices: Mapping[str, Tensor], module: str) -> tuple[Tensor, Tensor]:
    """A and B of every expert, shared or not."""
    a, b = (matrices[f"{module}.lora_{x}.weight"] for x in "AB")
    n = max(len(a), len(b))
    return a.expand(n, -1, -1), b.expand(n, -1, -1)


def _stack(module: str, a: Tensor, b: Tensor) -> Matrices:
    """PEFT's order: A with the expert as its slowest index, B as its fastest."""
    return {f"{module}.lora_A.weight": a.flatten(0, 1), f"{module}.lora_B.weight": b.permute(1, 2, 0).flatten(1)}


def _unstack(stored: Matrices, key: str, shapes: Mapping[str, torch.Size], layout: Layout) -> None:
    module = key.removesuffix(".lora_A.weight")
    head = module.removesuffix(".base_layer")
    a, b = stored.pop(key), stored.pop(f"{module}.lora_B.weight", None)
    if f"{head}.w1.lora_B.weight" not in shapes:
        raise AdapterError(f"{key} has no place in this model")
    if b is None:
        raise AdapterError(f"{module} has only one of lora_A and lora_B")
    n, size, _ = shapes[f"{head}.w1.lora_B.weight"]
    hidden = shapes[f"{head}.w2.lora_B.weight"][1]
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or len(a) % n:
        raise AdapterError(f"{key} has shape {list(a.shape)}, lora_B {list(b.shape)}: not those of {n} experts")
    a, b = a.unflatten(0, (n, -1)), b.unflatten(1, (-1, n)).permute(2, 0, 1)
    ups = ("w1", "w3") if layout.are_experts_gated else ("w1",)
    known = {(hidden, size): ("w2",), (len(ups) * size, hidden): ups}
    parts = known.get((b.shape[1], a.shape[2]))
    if parts is None and layout.are_experts_gated:  # without a gate, up and down have each other's shapes
        parts = known.get((a.shape[2], b.shape[1]))
        a, b = (b.mT, a.mT) if parts else (a, b)  # PEFT before 0.19 took the parameter's second axis as its input
    if parts == ups and hidden == size and module == head:
        parts = ("w2",)  # both fit: the outer one is down
    if parts is not None:
        if layout.is_interleaved and len(parts) > 1:
            b = by_halves(b)
        stored.update(_parts(key, head, parts, a, b, layout.rank))
        return
    raise AdapterError(f"{key} has shape {list(a.shape)}, lora_B {list(b.shape)}: not those of this model's experts")


def _parts(key: str, head: str, parts: tuple[str, ...], a: Tensor, b: Tensor, rank: int) -> Matrices:
    """Gate and up of the adapter's own rank have the same A; with twice the rank each has its own."""
    n, found = len(parts), {}
    if a.shape[1] not in (rank, n * rank):
        raise AdapterError(f"{key} has rank {a.shape[1]}; supported: {rank}" + (f" or {n * rank}" if n > 1 else ""))
    is_joined = n > 1 and a.shape[1] == n * rank
    for i, (part, b_part) in enumerate(zip(parts, b.chunk(n, 1), strict=True)):
        own = slice(i * rank, (i + 1) * rank) if is_joined else slice(None)
        if is_joined and b_part.count_nonzero() != b_part[:, :, own].count_nonzero():
            raise AdapterError(f"{key} mixes the ranks of gate and up; supported: a block of {rank} for each")
        found[f"{head}.{part}.lora_A.weight"], found[f"{head}.{part}.lora_B.weight"] = a[:, own], b_part[:, :, own]
    return found


def _collect(stored: Matrices, key: str, shapes: Mapping[str, torch.Size], parts: Mapping[str, str]) -> None:
    """Matrices of single experts as one, from the first of them; one that is missing is zero."""
    found = _SINGLE.fullmatch(key)
    assert found is not None
    head, part, kind = found[1], found[3], found[4]
    name = f"{head}.{parts.get(part)}.lora_{kind}.weight"
    if name in stored:
        return
    if name not in shapes:
        raise AdapterError(f"{key} has no place in this model")
    n = shapes[f"{head}.w1.lora_B.weight"][0]
    singles = {e: stored.pop(f"{head}.{e}.{part}.lora_{kind}.weight", None) for e in range(n)}
    first = next((t for t in singles.values() if t is not None), None)
    if first is None:
        raise AdapterError(f"{key}: this model has {n} experts")
    if any(t is not None and t.shape != first.shape for t in singles.values()):
        raise AdapterError(f"{key} has another shape than that of another expert")
    stored[name] = torch.stack([torch.zeros_like(first) if t is None else t for t in singles.values()])
