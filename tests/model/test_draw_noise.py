"""Hashed noise: as good as a generator's, and decided by seed, sample and position alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palestra.model.draw_noise import log_exponentials, noise_keys, uniform_grid
from palestra.types.sampling import sample_seed
from tests.properties import examples

SIZE = 1 << 10


def noise_of(*draws: tuple[int, int, int], vocabulary: int = 8) -> torch.Tensor:
    return -log_exponentials(torch.from_numpy(noise_keys(draws)), vocabulary)


NEIGHBOURS = {
    "seed": [(i, 0, 0) for i in range(SIZE)],
    "sample": [(7, i, 0) for i in range(SIZE)],
    "position": [(3, 0, i) for i in range(SIZE)],
}


@pytest.mark.parametrize("draws", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_noise_is_uniform_and_independent_between_neighbours(draws: list[tuple[int, int, int]]) -> None:
    """Chi-square over 64 bins (63 degrees, p = 0.0001 at 117) and correlations, which spread by 1e-3 over a million."""
    u = torch.exp(-torch.exp(-noise_of(*draws, vocabulary=SIZE).double())).numpy()
    counts = np.histogram(u, 64, (0, 1))[0]
    assert ((counts - u.size / 64) ** 2 / (u.size / 64)).sum() < 117
    for one, other in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[:, 64:], u[:, :-64]), (u, u.T)):
        off = one != other  # a table and its transpose share their diagonal
        assert abs(np.corrcoef(one[off], other[off])[0, 1]) < 5e-3


@pytest.mark.parametrize("draws", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_equally_likely_tokens_are_drawn_equally_often(draws: list[tuple[int, int, int]]) -> None:
    counts = np.bincount(noise_of(*draws, vocabulary=64).argmax(-1), minlength=64)
    assert ((counts - SIZE / 64) ** 2 / (SIZE / 64)).sum() < 117


def test_rare_tokens_keep_their_share() -> None:
    """Of 2^17 tokens at once one in 1,000 has E below 1e-3, and one in 10,000 below 1e-4: no digits are lost there."""
    small = torch.exp(-noise_of(*[(i, 0, 0) for i in range(32)], vocabulary=1 << 17).double()).flatten()
    for limit in (1e-3, 1e-4, 1e-5):
        expected = small.numel() * limit
        assert abs((small < limit).sum().item() - expected) < 4 * expected**0.5
    assert small[small < 1e-4].unique().numel() > 0.99 * (small < 1e-4).sum()


@examples(100)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 1000), st.integers(0, 50))
def test_a_sample_of_many_draws_what_it_would_draw_alone(seed: int, sample: int, position: int) -> None:
    own = sample_seed(seed, sample)
    assert noise_of((seed, sample, position)).equal(noise_of((own, 0, position)))
    assert 0 <= own < 2**63


def test_a_row_has_its_noise_in_any_batch() -> None:
    crowd = [(100 + i, 0, i) for i in range(5)]
    own = noise_of((5, 2, 2))
    assert noise_of(*crowd, (5, 2, 2), *crowd)[5:6].equal(own)
    assert all(not other.equal(own[0]) for other in noise_of((6, 2, 2), (5, 3, 2), (5, 2, 3)))


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, 2**70 + 3])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert noise_of((seed, 0, 0)).isfinite().all()


def test_seeds_do_not_share_their_streams() -> None:
    """Sample i + 1 of one seed is not sample i of the next, nor position p + 1 position p."""
    draws = [(seed, sample, position) for seed in range(6) for sample in range(6) for position in range(6)]
    assert len({tuple(key) for key in noise_keys(draws).tolist()}) == 6**3


def test_numbers_for_prompts_are_uniform_and_their_own() -> None:
    grid = uniform_grid(5, 3, 67, 64)
    assert ((grid >= 0) & (grid < 1)).all()
    counts = np.histogram(grid, 64, (0, 1))[0]
    assert ((counts - 64) ** 2 / 64).sum() < 117
    assert uniform_grid(5, 10, 12, 3).equal(grid[7:9, :3])
