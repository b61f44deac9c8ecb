"""The chance in a draw: hashes, so that no generator has a state, and restarts and batch mates change nothing.

A token is drawn as the largest of `log p - log E` over the vocabulary (Gumbel's trick), where E is an exponential
number of its own for each row and token:

    key[row]   = hash64(seed, sample, position)                 on the host
    x[row, t]  = hash32(key[row], t)                            one to one in t: tokens of a row never share a number
    E[row, t]  = -log(1 - v),  v = (31 bits of x + 1/2) / 2^31  a small v wins, and has all its digits

Two tokens are nearly as good in one draw of 100,000 when log p has an error of 1e-5, whatever the vocabulary's size. To
look where a number falls among cumulative probabilities is cheaper, but there every token has a border.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.types.sampling import SEED_STEP, SEEDS

TOKEN_STEP, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
LARGEST = 1 - 2.0**-24  # the largest v: E stays finite


def noise_keys(draws: Sequence[tuple[int, int, int]]) -> NDArray[np.int32]:
    """int32 [rows, 2]: 64 bits for each draw, from its (seed, sample, position) alone."""
    seed, sample, position = np.array([(seed & _MASK, *rest) for seed, *rest in draws], np.uint64).T
    return _mixed(seed, sample, position).view(np.int32).reshape(-1, 2)


def log_exponentials(keys: Tensor, vocabulary: int) -> Tensor:
    """log E, float32 [rows, vocabulary]. `kernels.draw` computes the same."""
    x = torch.arange(vocabulary, dtype=torch.int32, device=keys.device).mul_(_signed(TOKEN_STEP))
    x = x ^ keys[:, :1]
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(FIRST_FACTOR)
    x ^= keys[:, 1:]
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(SECOND_FACTOR)
    x ^= (x >> 16) & 0xFFFF
    x &= 0x7FFFFFFF
    v = x.float().add_(0.5).mul_(-(2.0**-31)).clamp_min_(-LARGEST)  # negative
    return v.log1p_().neg_().log_()


def uniform_grid(seed: int, start: int, stop: int, k: int) -> Tensor:
    """k numbers in [0, 1) for each prompt position, [stop - start, k], as of samples that no request has."""
    samples = _PROMPT_DRAWS + np.arange(k, dtype=np.uint64)
    positions = np.arange(start, stop, dtype=np.uint64)[:, None]
    mixed = _mixed(np.array([[seed & _MASK]], np.uint64), samples, positions)
    return torch.from_numpy((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mixed(seed: NDArray[np.uint64], sample: NDArray[np.uint64], position: NDArray[np.uint64]) -> NDArray[np.uint64]:
    own_seed = (seed + sample * _SAMPLE_STEP) & np.uint64(SEEDS - 1)  # as `sample_seed`
    return _mix(_mix(own_seed) + position * _POSITION_STEP)


_MASK = (1 << 64) - 1
_PROMPT_DRAWS = np.uint64(1 << 40)  # samples of a request are numbered from 0
# Odd constants with well-mixed bits: neighbouring samples and positions start far apart.
_SAMPLE_STEP, _POSITION_STEP = np.uint64(SEED_STEP), np.uint64(0xD1B54A32D192ED03)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every input bit reaches every output bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _signed(number: int) -> int:
    return number - (1 << 32) if number >> 31 else number
