"""Mamba-2's state space in its two forms: single positions by a step, and chunks of 64 by products; see `chunked_scan`.

Of one head, with the state S [state size, head dim] before a position, and its x, dt, g, B and C:

    S <- e^g S + B (dt x)^T             and returns: S^T C, with the new S

Of a chunk, with B, C [64, state size], X [64, head dim] (each x times its dt), G [64] the sums of g up to each
position, S the state before it, and D [64, 64] with e^(G_i - G_j) for j <= i and 0 elsewhere:

    Y = e^G C S + (D * (C B^T)) X       S <- e^G_last S + (e^(G_last - G) B)^T X

Heads of a group share B and C.
"""

from __future__ import annotations

from torch import Tensor

from palestra.model.loading.layer_spec import MambaSpec
from palestra.model.mixers.chunked_scan import ChunkLayout, chunked_scan


def state_space(
    xbc: Tensor, dt: Tensor, decay: Tensor, layout: ChunkLayout, spec: MambaSpec, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[tokens, heads, head_dim] and the last state of each sequence; see `chunked_scan`."""
    return chunked_scan(_chunk, xbc, dt, decay, layout, spec, state)


def _chunk(xbc: Tensor, dt: Tensor, decay: Tensor, state: Tensor, spec: MambaSpec) -> tuple[Tensor, Tensor]:
    """One chunk each of n sequences: [n, 64, heads, head_dim], and their states after it."""
    x, b, c = _heads(xbc, spec)
    share = (spec.n_groups, spec.n_heads // spec.n_groups)
    b, c = (y.transpose(1, 2).unsqueeze(2) for y in (b, c))  # [n, groups, 1, 64, state]
    x, decay, state = (
        y.unflatten(1, share) for y in ((x * dt.unsqueeze(-1)).transpose(1, 2), decay.transpose(1, 2), state)
    )
    total = decay.cumsum(-1)
    grown = total.exp().unsqueeze(-1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    out = (c * grown) @ state + ((c @ b.mT) * between) @ x
    left = (total[..., -1:] - total).exp().unsqueeze(-1)
    state = grown[..., -1:, :] * state + (b * left).mT @ x
    return out.flatten(1, 2).transpose(1, 2), state.flatten(1, 2)


def state_space_step(xbc: Tensor, dt: Tensor, decay: Tensor, state: Tensor, spec: MambaSpec) -> tuple[Tensor, Tensor]:
    """One position each of n sequences: [n, heads, head_dim], and their states after it."""
    x, b, c = _heads(xbc, spec)
    b, c = (y.repeat_interleave(spec.n_heads // spec.n_groups, 1).unsqueeze(-1) for y in (b, c))
    state = state * decay.exp()[..., None, None] + b * (x * dt.unsqueeze(-1)).unsqueeze(-2)
    return (state * c).sum(-2), state


def _heads(xbc: Tensor, spec: MambaSpec) -> tuple[Tensor, Tensor, Tensor]:
    """x of each head, B and C of each group, in float32: […, heads or groups, dim]."""
    shared = spec.n_groups * spec.state_size
    x, b, c = xbc.float().split([spec.inner_size, shared, shared], -1)
    b, c = (y.unflatten(-1, (spec.n_groups, spec.state_size)) for y in (b, c))
    return x.unflatten(-1, (spec.n_heads, spec.head_dim)), b, c
