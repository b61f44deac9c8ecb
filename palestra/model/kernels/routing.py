"""Where tokens go in a layer with experts: the router's logits, its choice, and the order of pairs by expert.

Logits are sums over chunks of the width, added in order, and a row's choice is one program's: its bits do not depend on
the rows beside it. A pair is a row and one of its k experts; pairs are sorted by a counting sort that keeps their order
within an expert, and cut into tiles, each of one expert:

    places [rows, k]     where each pair stands when they are sorted; -1: of a row that visits no expert
    order [pairs]        which pair stands there
    tiles [tiles, 3]     expert (-1: nothing to do), first place, pairs
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from palestra.model.kernels.narrow import chunk_sums
from palestra.model.loading.layer_spec import ExpertsSpec

PAIRS = 128  # that one program counts and places
FEW_ROWS = 128
SUM_EPS = 1e-20  # what transformers adds to the sum of sigmoids before it divides


@triton.jit
def _route_kernel(
    SUMS, BIAS, REPLAYED, SLOTS, LOGITS, NUMBERS, WEIGHTS, rows, scale, sum_eps,
    E: tl.constexpr, EB: tl.constexpr, TOP: tl.constexpr, TB: tl.constexpr, N_CHUNKS: tl.constexpr,
    IS_SIGMOID: tl.constexpr, NORMALISES: tl.constexpr, GROUPS: tl.constexpr, GB: tl.constexpr, KEPT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_REPLAYED: tl.constexpr, HAS_SLOTS: tl.constexpr,
):  # fmt: skip
    """A row's experts and their weights. Experts that are not a number are chosen last; of equals, the first is."""
    row = tl.program_id(0).to(tl.int64)
    e, j = tl.arange(0, EB), tl.arange(0, TB)
    logits = tl.zeros((EB,), tl.float32)
    for chunk in range(N_CHUNKS):
        logits += tl.load(SUMS + (chunk * rows + row) * E + e, mask=e < E, other=0.0)
    scores = logits
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    ranked = scores
    if HAS_BIAS:
        ranked += tl.load(BIAS + e, mask=e < E, other=0.0)
        if not IS_SIGMOID:
            scores = ranked
    tl.store(LOGITS + row * E + e, logits, mask=e < E)
    low = float("-inf")
    ranked = tl.where((e < E) & (ranked == ranked), ranked, low)
    if KEPT < GROUPS:  # those groups whose best two experts have the largest sums
        group, g = e // (E // GROUPS), tl.arange(0, GB)
        sums = tl.full((GB,), low, tl.float32)
        for i in tl.static_range(GROUPS):
            own = tl.where(group == i, ranked, low)
            best = tl.max(own, 0)
            second = tl.max(tl.where(e == tl.argmax(own, 0), low, own), 0)
            sums = tl.where(g == i, best + second, sums)
        keeps = tl.zeros((EB,), tl.int32)
        for _ in tl.static_range(KEPT):
            best_group = tl.argmax(sums, 0)
            keeps += (group == best_group).to(tl.int32)
            sums = tl.where(g == best_group, low, sums)
        ranked = tl.where(keeps > 0, ranked, low)
    numbers, chosen = tl.zeros((TB,), tl.int32), tl.full((TB,), low, tl.float32)
    for i in tl.static_range(TOP):
        best = tl.minimum(tl.argmax(ranked, 0), E - 1)
        number = best
        if HAS_REPLAYED:
            replayed = tl.load(REPLAYED + row * TOP + i).to(tl.int32)
            number = tl.where(replayed < 0, best, replayed)
        value = tl.sum(tl.where(e == number, scores, 0.0), 0)
        numbers, chosen = tl.where(j == i, number, numbers), tl.where(j == i, value, chosen)
        ranked = tl.where(e == best, low, ranked)
    if IS_SIGMOID:
        weights = tl.where(j < TOP, chosen, 0.0)
        if NORMALISES:
            weights = weights / (tl.sum(weights, 0) + sum_eps)
        weights = weights * scale
    elif NORMALISES:
        weights = tl.exp(chosen - tl.max(chosen, 0))
        weights = weights / tl.sum(weights, 0)
    else:
        real = tl.where(e < E, scores, low)
        most = tl.max(real, 0)
        weights = tl.exp(chosen - most) / tl.sum(tl.exp(real - most), 0)
    if HAS_SLOTS:
        numbers = tl.where(tl.load(SLOTS + row) < 0, -1, numbers)
    tl.store(NUMBERS + row * TOP + j, numbers.to(tl.int64), mask=j < TOP)
    tl.store(WEIGHTS + row * TOP + j, weights, mask=j < TOP)


@triton.jit
def _count(NUMBERS, block, n_pairs, EB: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr):
    """Returns how many pairs of a block visit each expert."""
    counts = tl.zeros((EB,), tl.int32)
    for start in range(block * PAIRS, tl.minimum((block + 1) * PAIRS, n_pairs), STEP):
        p = start + tl.arange(0, STEP)
        own = tl.load(NUMBERS + p, mask=p < n_pairs, other=-1).to(tl.int32)
        counts += tl.sum((own[:, None] == tl.arange(0, EB)[None]).to(tl.int32), 0)
    return counts


@triton.jit
def _count_kernel(NUMBERS, COUNTS, n_pairs, E, EB: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr):
    """COUNTS[block] = how many pairs of a block visit each expert."""
    block, e = tl.program_id(0), tl.arange(0, EB)
    counts = _count(NUMBERS, block, n_pairs, EB, PAIRS, STEP)
    tl.store(COUNTS + block * E + e, counts, mask=e < E)


@triton.jit
def _place_kernel(
    NUMBERS, COUNTS, ORDER, PLACES, ENDS, TILES, n_pairs, n_blocks, n_tiles, E,
    IS_ONE_BLOCK: tl.constexpr, EB: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Places of a block's pairs: behind those of the experts before, and of the same expert in earlier blocks, whose
    COUNTS are there, unless all pairs are one block. The programs behind those of blocks cut STEP tiles each."""
    block, e, s = tl.program_id(0), tl.arange(0, EB), tl.arange(0, STEP)
    total, before = tl.zeros((EB,), tl.int32), tl.zeros((EB,), tl.int32)
    if IS_ONE_BLOCK:
        total = _count(NUMBERS, 0, n_pairs, EB, PAIRS, STEP)
    else:
        for start in range(0, n_blocks, STEP):
            b = (start + s)[:, None]
            counts = tl.load(COUNTS + b * E + e[None], mask=(b < n_blocks) & (e < E)[None], other=0)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where(b < block, counts, 0), 0)
    first = tl.cumsum(total, 0) - total
    if block < n_blocks:
        for start in range(block * PAIRS, tl.minimum((block + 1) * PAIRS, n_pairs), STEP):
            p = start + s
            own = tl.load(NUMBERS + p, mask=p < n_pairs, other=-1).to(tl.int32)
            place = tl.sum(tl.where(own[:, None] == e[None], (first + before)[None], 0), 1)
            place += tl.sum(((own[:, None] == own[None]) & (s[None] < s[:, None])).to(tl.int32), 1)
            before += tl.sum((own[:, None] == e[None]).to(tl.int32), 0)
            tl.store(PLACES + p, tl.where(own >= 0, place, -1), mask=p < n_pairs)
            tl.store(ORDER + place, p, mask=own >= 0)
    else:
        tl.store(ENDS + e, first + total, mask=e < tl.where(block == n_blocks, E, 0))
        per_expert = (total + BM - 1) // BM
        ends, t = tl.cumsum(per_expert, 0), (block - n_blocks) * STEP + s
        expert = tl.sum((ends[:, None] <= t[None]).to(tl.int32), 0)
        is_own, is_tile = e[:, None] == expert[None], t < n_tiles
        done = (t - tl.sum(tl.where(is_own, (ends - per_expert)[:, None], 0), 0)) * BM
        left = tl.sum(tl.where(is_own, total[:, None], 0), 0) - done
        tl.store(TILES + t * 3, tl.where(expert < E, expert, -1), mask=is_tile)
        tl.store(TILES + t * 3 + 1, tl.sum(tl.where(is_own, first[:, None], 0), 0) + done, mask=is_tile)
        tl.store(TILES + t * 3 + 2, tl.minimum(left, BM), mask=is_tile)


def choose(
    x: Tensor,
    router: Tensor,
    bias: Tensor | None,
    spec: ExpertsSpec,
    replayed: Tensor | None = None,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The router's logits without bias, the weights (float32) and the numbers of each row's experts. Rows whose slot
    is below 0 visit no expert: their numbers are -1."""
    rows, n = len(x), spec.n_experts
    logits = torch.empty(rows, n, dtype=torch.float32, device=x.device)
    weights = torch.empty(rows, spec.per_token, dtype=torch.float32, device=x.device)
    numbers = torch.empty(rows, spec.per_token, dtype=torch.int64, device=x.device)
    if not rows:
        return logits, weights, numbers
    sums = chunk_sums(x, router)
    n_groups, kept = spec.groups
    _route_kernel[(rows,)](
        *(sums, sums if bias is None else bias, numbers if replayed is None else replayed),
        *(numbers if slots is None else slots, logits, numbers, weights, rows, spec.scale, SUM_EPS),
        E=n,
        EB=triton.next_power_of_2(n),
        TOP=spec.per_token,
        TB=triton.next_power_of_2(spec.per_token),
        N_CHUNKS=len(sums),
        IS_SIGMOID=spec.router == "sigmoid",
        NORMALISES=spec.normalises,
        GROUPS=n_groups,
        GB=triton.next_power_of_2(n_groups),
        KEPT=kept,
        HAS_BIAS=bias is not None,
        HAS_REPLAYED=replayed is not None,
        HAS_SLOTS=slots is not None,
        num_warps=1,
    )
    return logits, weights, numbers


@dataclass(frozen=True, slots=True)
class SortedPairs:
    order: Tensor
    places: Tensor
    ends: Tensor
    """[experts]: where each expert's pairs end, in sorted order."""
    tiles: Tensor
    tile_pairs: int


def sort_pairs(numbers: Tensor, n_experts: int) -> SortedPairs:
    """`numbers`: of each row's experts, [rows, k]; -1 where there is none."""
    n_pairs, device, tile_pairs = numbers.numel(), numbers.device, _tile_pairs(*numbers.shape, n_experts)
    n_blocks = max(1, triton.cdiv(n_pairs, PAIRS))
    n_tiles = min(n_pairs, triton.cdiv(n_pairs, tile_pairs) + n_experts)
    counts = torch.empty(n_blocks, n_experts, dtype=torch.int32, device=device)
    order = torch.empty(n_pairs, dtype=torch.int32, device=device)
    places = torch.empty(numbers.shape, dtype=torch.int32, device=device)
    ends = torch.empty(n_experts, dtype=torch.int32, device=device)
    tiles = torch.empty(n_tiles, 3, dtype=torch.int32, device=device)
    step = min(32, max(8, triton.next_power_of_2(n_pairs)))
    size = {"EB": triton.next_power_of_2(n_experts), "PAIRS": PAIRS, "STEP": step, "num_warps": 4}
    if n_blocks > 1:
        _count_kernel[(n_blocks,)](numbers, counts, n_pairs, n_experts, **size)
    _place_kernel[(n_blocks + triton.cdiv(n_tiles, step),)](
        *(numbers, counts, order, places, ends, tiles, n_pairs, n_blocks, n_tiles, n_experts),
        IS_ONE_BLOCK=n_blocks == 1,
        BM=tile_pairs,
        **size,
    )
    return SortedPairs(order, places, ends, tiles, tile_pairs)


def _tile_pairs(rows: int, per_token: int, n_experts: int) -> int:
    """Pairs of a tile. None of the sizes changes a bit of a product."""
    if rows <= FEW_ROWS:
        return 16
    of_an_expert = rows * per_token / n_experts
    return 32 if of_an_expert <= 16 else 64 if of_an_expert < 128 else 128
