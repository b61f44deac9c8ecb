"""Training data that say which sampled sequences their tokens come from."""

from __future__ import annotations

import tinker
from hypothesis import given
from hypothesis import strategies as st

from palestra.training.batches.grpo_batch import to_sequence
from palestra.training.tinker_policy import to_datum, with_provenance
from tests.properties import examples
from tests.training.records import make_rollout, make_turn


def positions(spans: tinker.types.ProvenanceSpans, prompts: dict[str, int]) -> list[tuple[str, int]]:
    """The sequence and the position in its context, for every token that the spans cover."""
    found = []
    for span in spans:
        is_sampled = isinstance(span, tinker.types.SampledProvenanceSpan)
        first = span.offset + (prompts[span.sequence_id] if is_sampled else 0)
        found += [(span.sequence_id, first + i) for i in range(span.length)]
    return found


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=4), st.integers(3, 30))
def test_spans_cover_every_token_at_its_own_position(shapes, limit):
    turns = [make_turn(n, observation, sequence_id=f"s{i}") for i, (observation, n) in enumerate(shapes)]
    row = make_rollout(prompt=[1, 2, 3], turns=turns).rows[0]
    sequence = to_sequence(row, 1.0, limit)
    prompts, known, end = {}, {}, 3
    for i, (observation, n) in enumerate(shapes):
        prompts[f"s{i}"] = end + observation
        end += observation + n
        known[f"s{i}"] = end - 1  # positions that were inputs when it was sampled
    datum = with_provenance(to_datum(sequence, "ppo"), sequence)
    inputs = positions(datum.model_input_spans, prompts)
    assert [position for _, position in inputs] == list(range(len(sequence.tokens) - 1))
    assert all(position < known[name] for name, position in inputs)
    targets = positions(datum.loss_fn_input_spans, prompts)
    assert [position for _, position in targets] == list(range(1, len(sequence.tokens)))


def test_rows_with_an_unknown_turn_say_nothing():
    turns = [make_turn(2, sequence_id="s0"), make_turn(2, 1)]
    sequence = to_sequence(make_rollout(turns=turns).rows[0], 1.0, 30)
    assert with_provenance(to_datum(sequence, "ppo"), sequence).model_input_spans is None
