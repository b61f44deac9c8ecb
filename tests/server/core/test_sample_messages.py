"""Samples that wait keep equal prompts once, and are sent as they were encoded."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st

from palestra.server.core.futures import SampleMessages
from palestra.types import Picture, PlacedImage, SampleRequest, SamplingParams
from palestra.types.engine import BaseModel, Sample, encode_message


def sample(name: str, prompt: list[int]) -> Sample:
    request = SampleRequest(prompt=tuple(prompt), params=SamplingParams(max_tokens=1))
    return Sample(request_id=name, weights=BaseModel(), request=request)


@given(st.text(max_size=20), st.lists(st.integers(0, 200_000), max_size=300))
def test_a_message_is_sent_as_it_was_encoded(name: str, prompt: list[int]):
    one = sample(name, prompt)
    assert SampleMessages().make(one).encode() == encode_message(one)


def test_a_long_prompt_is_kept_once_for_as_long_as_a_sample_waits():
    messages, prompt = SampleMessages(), list(range(1000))
    group = [messages.make(sample(str(number), prompt)) for number in range(16)]
    assert len({id(message.prompt) for message in group}) == 1
    assert messages.make(sample("other", prompt[::-1])).prompt is not group[0].prompt
    del group
    gc.collect()
    assert not messages._prompts


def test_pictures_are_kept_once_with_their_prompt():
    picture = Picture.of_pixels(bytes(range(192)) * 16, 32, 32)
    request = SampleRequest(prompt=(1, 2, 3), images=(PlacedImage(1, picture.digest),), pictures=(picture,))
    group = [Sample(request_id=name, weights=BaseModel(), request=request) for name in ("a", "b")]
    messages = SampleMessages()
    made = [messages.make(one) for one in group]
    assert [one.encode() for one in made] == [encode_message(one) for one in group]
    assert made[0].prompt is made[1].prompt
    assert all(picture.packed not in one.head + one.tail for one in made)
