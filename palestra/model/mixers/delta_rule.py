"""The gated delta rule in its two forms: single positions by a step, and chunks of 64 by products; see `chunked_scan`.

Of one head, with the state S [key dim, value dim] before a position, and its q, k, v, beta and g:

    c = beta (v - (e^g S)^T k)          what the position changes, [value dim]
    S <- e^g S + k c^T                  and returns: S^T q, with the new S

Of a chunk, with Q, K [64, key dim], V [64, value dim], G [64] the sums of g up to each position, S the state before it,
and D [64, 64] with e^(G_i - G_j) for j <= i and 0 elsewhere:

    (I + L) C = beta (V - e^G K S)      L [64, 64]: what is below the diagonal of beta D * (K K^T)
    Y = e^G Q S + (D * (Q K^T)) C       S <- e^G_last S + (e^(G_last - G) K)^T C

The triangular solve is that of beta V and of beta e^G K, which need no state. Value heads share q and k of a key head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from palestra.model.loading.layer_spec import DeltaNetSpec
from palestra.model.mixers.chunked_scan import ChunkLayout, chunked_scan


def delta_rule(
    qkv: Tensor, beta: Tensor, decay: Tensor, layout: ChunkLayout, spec: DeltaNetSpec, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[tokens, value heads, value dim] and the last state of each sequence; see `chunked_scan`."""
    return chunked_scan(_chunk, qkv, beta, decay, layout, spec, state)


def _chunk(qkv: Tensor, beta: Tensor, decay: Tensor, state: Tensor, spec: DeltaNetSpec) -> tuple[Tensor, Tensor]:
    """One chunk each of n sequences: [n, 64, value heads, value dim], and their states after it."""
    q, k, v = _heads(qkv, spec)
    share = (spec.n_key_heads, spec.n_value_heads // spec.n_key_heads)
    q, k = (x.transpose(1, 2).unsqueeze(2) for x in (q, k))  # [n, key heads, 1, 64, dim]
    v, beta, decay, state = (
        x.unflatten(1, share)
        for x in (v.transpose(1, 2), beta.transpose(1, 2).unsqueeze(-1), decay.transpose(1, 2), state)
    )
    total = decay.cumsum(-1)
    grown = total.exp().unsqueeze(-1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    inner = ((k @ k.mT) * between * beta).tril(-1)
    values = torch.cat([(v * beta).expand(*v.shape), k * (beta * grown)], -1)
    solved = torch.linalg.solve_triangular(inner, values, upper=False, unitriangular=True)
    u, w = solved.split([spec.value_dim, spec.key_dim], -1)
    change = u - w @ state
    out = (q * grown) @ state + ((q @ k.mT) * between) @ change
    left = (total[..., -1:] - total).exp().unsqueeze(-1)
    state = grown[..., -1:, :] * state + (k * left).mT @ change
    return out.flatten(1, 2).transpose(1, 2), state.flatten(1, 2)


def delta_step(qkv: Tensor, beta: Tensor, decay: Tensor, state: Tensor, spec: DeltaNetSpec) -> tuple[Tensor, Tensor]:
    """One position each of n sequences: [n, value heads, value dim], and their states after it."""
    q, k, v = _heads(qkv, spec)
    q, k = (x.repeat_interleave(spec.n_value_heads // spec.n_key_heads, 1).unsqueeze(-1) for x in (q, k))
    state = state * decay.exp()[..., None, None]
    change = beta.unsqueeze(-1) * (v - (state * k).sum(-2))
    state = state + k * change.unsqueeze(-2)
    return (state * q).sum(-2), state


def _heads(qkv: Tensor, spec: DeltaNetSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of length 1 (queries scaled), and values, in float32: […, heads, dim]."""
    q, k, v = qkv.float().split([spec.key_size, spec.key_size, spec.value_size], -1)
    q, k = (x.unflatten(-1, (spec.n_key_heads, spec.key_dim)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return q * spec.key_dim**-0.5, k, v.unflatten(-1, (spec.n_value_heads, spec.value_dim))
