"""Records of visited experts: found by the sequences that data name, by their owner alone, within a budget."""

from __future__ import annotations

from palestra.server.core.training.routing_records import ProvenanceSpan, RoutingRecords
from palestra.types import RoutedExperts, SampledSequence, StopReason

SCOPE = ("ada", "moe")
MISSING = b"\xff\xff"


def sequence(n_prompt: int, n_tokens: int, first: int) -> SampledSequence:
    """With ids that count up from `first`, two for each position."""
    positions = n_prompt + n_tokens - 1
    routing = RoutedExperts(data=bytes(range(first, first + 2 * positions)), shape=(positions, 1, 2))
    return SampledSequence(
        tokens=[0] * n_tokens, logprobs=[0.0] * n_tokens, stop_reason=StopReason.STOP, routing=routing
    )


def prompt(name: str, offset: int, length: int) -> ProvenanceSpan:
    return ProvenanceSpan(name, offset, length, is_sampled=False)


def sampled(name: str, offset: int, length: int) -> ProvenanceSpan:
    return ProvenanceSpan(name, offset, length, is_sampled=True)


def test_two_turns_are_put_together_position_by_position():
    records, one, two = RoutingRecords(1000), sequence(3, 2, 0), sequence(6, 3, 100)
    records.keep(SCOPE, ["one", "two"], [one, two])
    assert (one.routing, two.routing) == (None, None)  # answers to clients do not carry it
    found = records.find(SCOPE, [prompt("one", 0, 3), sampled("one", 0, 1), prompt("two", 4, 2), sampled("two", 0, 2)])
    assert found is not None
    assert found.shape == (8, 1, 2)
    assert found.data == bytes(range(8)) + bytes(range(108, 116))


def test_what_was_not_recorded_is_marked():
    records = RoutingRecords(1000)
    records.keep(SCOPE, ["one"], [sequence(2, 2, 0)])
    spans = [prompt("one", 0, 2), sampled("one", 0, 2), prompt("unknown", 4, 1)]
    assert records.find(SCOPE, spans).data == bytes(range(6)) + 2 * MISSING
    assert records.find(SCOPE, spans[2:]) is None
    assert records.find(SCOPE, []) is None


def test_others_find_nothing():
    records = RoutingRecords(1000)
    records.keep(SCOPE, ["one"], [sequence(2, 2, 0)])
    records.keep(("eve", "moe"), ["hers"], [sequence(2, 2, 50)])
    for scope in (("eve", "moe"), ("ada", "dense")):
        assert records.find(scope, [prompt("one", 0, 2)]) is None
    assert records.find(SCOPE, [prompt("hers", 0, 1), prompt("one", 0, 1)]).data == MISSING + bytes([0, 1])


def test_the_oldest_go_first():
    records = RoutingRecords(14)
    for n in range(4):
        records.keep(SCOPE, [f"s{n}"], [sequence(2, 2, 10 * n)])
    assert [records.find(SCOPE, [prompt(f"s{n}", 0, 1)]) is not None for n in range(4)] == [False, False, True, True]
