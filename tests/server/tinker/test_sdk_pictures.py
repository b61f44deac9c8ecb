"""Pictures through the official Tinker SDK: sampled, trained, replayed after a crash, and refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.pictures import data_url, drawn, file_of

if TYPE_CHECKING:
    from tests.server.conftest import Server

pytestmark = pytest.mark.slow

ROWS = 12
"""Positions of a picture of 64 x 48 pixels: the random model's squares have 16 x 16."""
BEFORE, BEHIND = [17, 301, 503], [505, 44, 81]
"""Ids around a picture; 503 and 505 are the tokens that begin and end one."""

NO_TARGETS: Any = {"target_tokens": np.zeros(len(BEFORE) + ROWS + len(BEHIND), np.int64)}


@pytest.fixture(scope="module")
def seeing(make_module_server, random_model) -> Server:
    return make_module_server(model=random_model("qwen3_vl"))


@pytest.fixture(scope="module")
def service(seeing: Server) -> Iterator[tinker.ServiceClient]:
    with seeing.client() as client:
        yield client


def picture(seed: int = 0, **fields: Any) -> types.ImageChunk:
    return types.ImageChunk(data=file_of(drawn(seed)), format="png", expected_tokens=ROWS, **fields)


def prompt(*chunks: Any) -> types.ModelInput:
    texts = types.EncodedTextChunk(tokens=BEFORE), types.EncodedTextChunk(tokens=BEHIND)
    return types.ModelInput(chunks=[texts[0], *chunks, texts[1]])


def datum(tokens: list[int], logprobs: list[float], seed: int = 0) -> types.Datum:
    """A prompt with a picture, and what was sampled behind it, for importance sampling."""
    given = prompt(picture(seed))
    given.chunks.append(types.EncodedTextChunk(tokens=tokens[:-1]))
    n = len(BEFORE) + ROWS + len(BEHIND) - 1
    ids = BEFORE[1:] + [0] * ROWS + BEHIND
    inputs = {
        "target_tokens": np.array(ids + tokens),
        "logprobs": np.array([0.0] * n + logprobs, np.float32),
        "advantages": np.array([0.0] * n + [1.0] * len(tokens), np.float32),
    }
    return types.Datum(given, inputs)


def sample(client: Any, given: types.ModelInput, n: int = 4) -> Any:
    return client.sample(given, n, types.SamplingParams(max_tokens=6, seed=3, stop=[])).result()


def trained(service: tinker.ServiceClient, seeing: Server, *, dies: bool) -> list[Any]:
    """Samples, trains on them, and returns all numbers that came back."""
    client = service.create_lora_training_client(seeing.name, rank=4, seed=1)
    found: list[Any] = []
    for step in range(2):
        answer = sample(client.save_weights_and_get_sampling_client(), prompt(picture(step)))
        data = [datum(list(s.tokens), list(s.logprobs), step) for s in answer.sequences]
        done = client.forward_backward(data, "importance_sampling")
        if dies and step:
            seeing.kill_both()
            seeing.start()
        outputs = done.result().loss_fn_outputs
        found += [(list(s.tokens), list(s.logprobs)) for s in answer.sequences]
        found += [output["logprobs"].tolist() for output in outputs]
        client.optim_step(types.AdamParams(learning_rate=0.01)).result()
    last = sample(client.save_weights_and_get_sampling_client(), prompt(picture(5)))
    return [*found, *((list(s.tokens), list(s.logprobs)) for s in last.sequences)]


def test_trainer_and_sampler_agree_and_see(service: tinker.ServiceClient, seeing: Server) -> None:
    client = service.create_lora_training_client(seeing.name, rank=4, seed=1)
    sampler = client.save_weights_and_get_sampling_client()
    answer, other = (sample(sampler, prompt(picture(seed))) for seed in (0, 1))
    assert [s.tokens for s in answer.sequences] != [s.tokens for s in other.sequences]
    data = [datum(list(s.tokens), list(s.logprobs)) for s in answer.sequences]
    for sequence, output in zip(
        answer.sequences, client.forward(data, "importance_sampling").result().loss_fn_outputs, strict=True
    ):
        assert output["logprobs"].to_numpy()[-6:] == pytest.approx(np.array(sequence.logprobs), abs=2e-5)
    jpeg = types.ImageChunk(data=file_of(drawn(0), "JPEG"), format="jpeg")
    pointer = types.ImageAssetPointerChunk(format="png", location=data_url(file_of(drawn(0))), expected_tokens=ROWS)
    assert [s.tokens for s in sample(sampler, prompt(pointer)).sequences] == [s.tokens for s in answer.sequences]
    assert len(sample(sampler, prompt(jpeg)).sequences) == 4
    scored = sampler.compute_logprobs(prompt(picture())).result()
    assert scored[0] is None
    assert scored[3 : 3 + ROWS] == [0.0] * ROWS
    assert all(one is not None and one < 0 for one in [*scored[1:3], *scored[3 + ROWS :]])


def test_a_run_that_is_killed_ends_at_the_same_bits(service: tinker.ServiceClient, seeing: Server) -> None:
    assert trained(service, seeing, dies=True) == trained(service, seeing, dies=False)


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        (types.ImageChunk(data=b"no picture", format="png"), "it is no PNG, JPEG, WEBP, GIF file"),
        (types.ImageChunk(data=file_of(drawn())[:200], format="png"), "damaged or cut short"),
        (picture().model_copy(update={"expected_tokens": 13}), "Expected 13 tokens, got 12 from image"),
    ],
)
def test_pictures_that_cannot_be_read_are_refused(
    service: tinker.ServiceClient, seeing: Server, chunk: types.ImageChunk, said: str
) -> None:
    client = service.create_lora_training_client(seeing.name, rank=4, seed=1)
    given = types.Datum(prompt(chunk), NO_TARGETS)
    with pytest.raises(tinker.BadRequestError, match=said):
        client.forward_backward([given], "cross_entropy").result()
    with pytest.raises(tinker.BadRequestError, match=said):
        sample(client.save_weights_and_get_sampling_client(), prompt(chunk))


def test_what_stands_elsewhere_is_not_fetched(service: tinker.ServiceClient, seeing: Server) -> None:
    sampler = service.create_sampling_client(base_model=seeing.name)
    for location in ("https://example.com/a.png", "file:///etc/passwd", "a.png"):
        pointer = types.ImageAssetPointerChunk(format="png", location=location)
        with pytest.raises(tinker.BadRequestError, match="data: URLs only"):
            sample(sampler, prompt(pointer))


def test_rows_of_a_picture_are_targets_of_nothing(service: tinker.ServiceClient, seeing: Server) -> None:
    client = service.create_lora_training_client(seeing.name, rank=4, seed=1)
    given = types.Datum(prompt(picture()), NO_TARGETS)
    with pytest.raises(tinker.TinkerError, match="position 2 predicts a row of a picture"):
        client.forward_backward([given], "cross_entropy").result()


def test_gemmas_pictures_are_sampled_and_trained(make_module_server: Any, random_model: Any) -> None:
    """They become as large as 70 positions allow, and their rows see each other."""
    server = make_module_server(model=random_model("gemma4_moe_vl"))
    with server.client() as service:
        client = service.create_lora_training_client(server.name, rank=4, seed=1)
        chunk = types.ImageChunk(data=file_of(drawn(0)), format="png", expected_tokens=63)
        text = types.EncodedTextChunk(tokens=[17, 301]), types.EncodedTextChunk(tokens=[44, 81])
        given = types.ModelInput(chunks=[text[0], chunk, text[1]])
        answer = sample(client.save_weights_and_get_sampling_client(), given)
        for sequence in answer.sequences:
            chunks = [*given.chunks, types.EncodedTextChunk(tokens=list(sequence.tokens)[:-1])]
            targets = np.array([0] * 66 + list(sequence.tokens))
            inputs: Any = {"target_tokens": targets, "weights": np.array([0.0] * 66 + [1.0] * 6, np.float32)}
            passed = client.forward([types.Datum(types.ModelInput(chunks=chunks), inputs)], "cross_entropy").result()
            found = passed.loss_fn_outputs[0]["logprobs"].to_numpy()[-6:]
            assert found == pytest.approx(np.array(sequence.logprobs), abs=2e-5)
