"""A request's gradient is one tree of sums, whoever computes its parts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from palestra.model import AdapterPool
from palestra.model.loading.spec import ModelSpec
from palestra.model.training.gradient_tree import GradientTree, balanced_shards, sum_in_tree_order, tree_place
from palestra.types import LoraConfig
from tests.properties import examples


def plain_tree(leaves: dict[int, torch.Tensor], first: int, step: int, shards: int) -> torch.Tensor | None:
    """The sum of the shards that are `first` modulo `step`, by the definition."""
    if step == shards:
        return leaves.get(first)
    halves = [plain_tree(leaves, start, 2 * step, shards) for start in (first, first + step)]
    found = [half for half in halves if half is not None]
    return found[0] + found[1] if len(found) == 2 else found[0] if found else None


def tree_sum(adapter, parts: list[tuple[int, torch.Tensor]], shards: int) -> torch.Tensor | None:
    """As an engine does it: shards in the order of their places, each summed in the gradient row."""
    tree = GradientTree.begin(adapter, shards)
    for shard, part in sorted(parts, key=lambda pair: tree_place(pair[0], shards)):
        tree.enter(shard)
        adapter.row("grads").add_(part)
    tree.close()
    found = adapter.row("grads").clone()
    adapter.row("grads").zero_()
    return found if parts else None


@given(st.data())
@examples(60)
def test_any_number_of_ranks_sums_to_the_bits_of_the_tree(micro_model, data):
    pool = AdapterPool(ModelSpec.from_folder(micro_model))
    adapter = pool.create(LoraConfig(rank=1, train_mlp=False, train_unembed=False))
    shards = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    n = data.draw(st.integers(1, 3 * shards))
    turn = data.draw(st.integers(0, 15))
    size = adapter.stack.layout.size
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    parts = [(i % shards, torch.randn(size, generator=generator)) for i in range(n)]
    leaves: dict[int, torch.Tensor] = {}
    for shard, part in parts:
        leaves[shard] = leaves[shard] + part if shard in leaves else torch.zeros(size) + part
    expected = plain_tree(leaves, 0, 1, shards)
    assert expected is not None
    ranks = 1
    while ranks <= shards:
        shares = [[pair for pair in parts if (pair[0] ^ turn) % ranks == rank] for rank in range(ranks)]
        found = sum_in_tree_order([tree_sum(adapter, share, shards) for share in shares])
        assert torch.equal(found, expected), (shards, ranks)
        ranks *= 2


@given(rows=st.lists(st.integers(1, 10_000), max_size=40), shards=st.sampled_from([1, 2, 4, 8]))
@examples(60)
def test_no_shard_has_more_rows_than_another_by_more_than_one_micro_batch(rows, shards):
    chosen = balanced_shards(rows, shards)
    assert len(chosen) == len(rows)
    loads = [sum(n for n, shard in zip(rows, chosen, strict=True) if shard == s) for s in range(shards)]
    assert max(loads) - min(loads) <= max(rows, default=0)
    for ranks in (2, 4):  # those that have a shard each, or several
        of_ranks = [sum(loads[rank::ranks]) for rank in range(min(ranks, shards))]
        assert max(of_ranks) - min(of_ranks) <= 1.5 * max(rows, default=0)
