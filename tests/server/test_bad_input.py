"""Whatever is sent: a clear answer with a status the SDK takes as final, and nobody else notices.

Beside every test of this module another tenant trains; its losses must stay what they were before.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import zstandard

from palestra.server.tinker.decode import pass_from_protobuf
from tests.server.raw import (
    NAME,
    RETRIED,
    Bystander,
    Model,
    Raw,
    datum,
    datum_of,
    ok,
    real,
    refused,
    text,
    whole,
    wire,
)

VOCABULARY, CONTEXT = 512, 4096  # of the micro model
MAX_BODY = 110_000_000
GAP_WAIT_S = 0.3
JSON = {"content-type": "application/json"}
MakeServer = Callable[..., Any]


@pytest.fixture(scope="module")
def busy_server(make_module_server: MakeServer) -> Any:
    return make_module_server(f"limits.max_body_bytes={MAX_BODY}", gap_wait_s=GAP_WAIT_S)


@pytest.fixture(scope="module")
def bystander(busy_server: Any) -> Iterator[Bystander]:
    with Bystander(Raw(busy_server)) as bystander:
        yield bystander


@pytest.fixture
def api(busy_server: Any, bystander: Bystander) -> Iterator[Raw]:
    bystander.go_on()
    yield Raw(busy_server)
    bystander.check()


@pytest.fixture(scope="module")
def shared_model(busy_server: Any) -> Model:
    return Raw(busy_server).model()


@pytest.fixture
def model(api: Raw, shared_model: Model) -> Model:
    """Of this module; whatever a test sends it, it has to work for the next one."""
    return shared_model


@pytest.fixture(scope="module")
def sampler(busy_server: Any) -> str:
    return Raw(busy_server).base_sampler()


def failed(api: Raw, submitted: Any, said: str = "") -> str:
    """A future that failed by the user's fault; returns what it says."""
    result = api.result(submitted)
    assert result.get("category") == "user", result
    assert said in result["error"], result
    return result["error"]


# Passes that cannot be read


def valid_bytes(model: Model) -> bytes:
    message = wire.ForwardBackwardRequest(
        model_id=model.model_id, seq_id=next(model.numbers), data=[datum()], loss_fn="cross_entropy"
    )
    return message.SerializeToString()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: b"",
        lambda body: b"\xff" * 100,
        lambda body: body[:-3],
        lambda body: body[: len(body) // 2],
        lambda body: body + b"\x0b",
        lambda body: json.dumps({"model_id": "x"}).encode(),
        lambda body: b"\x00" * 1000,
        lambda body: b"\x1a\xff\xff\xff\xff\x0f",  # data of four gigabytes, it says
        lambda body: b"\x1b" * 10_000,  # groups in groups
    ],
    ids=["empty", "noise", "cut", "half", "open group", "JSON", "zeros", "long length", "deep"],
)
def test_what_is_not_protobuf_is_400(model: Model, spoil: Callable[[bytes], bytes]) -> None:
    refused(model.send_bytes(spoil(valid_bytes(model))))
    model.works()


def test_a_field_of_the_wrong_kind_is_400(model: Model) -> None:
    refused(model.send_bytes(b"\x0a\x02\xff\xfe"))  # a model_id that is not UTF-8
    refused(model.send_bytes(wire.ForwardBackwardRequest(model_id="../../etc", seq_id=1).SerializeToString()))
    for seq_id in (0, -1, -(2**31)):
        refused(model.send_pass(seq_id=seq_id), said="seq_id")
    refused(model.api.http.post("/api/v1/forward_backward", content=valid_bytes(model)))  # without its content type
    model.works()


SHAPES: dict[str, wire.Datum] = {
    "targets too short": datum(target_tokens=whole(5, 6)),
    "weights too long": datum(weights=real(*[1.0] * 10)),
    "two dimensions": datum(weights=real(*[1.0] * 9, shape=(3, 3))),
    "targets are floats": datum(target_tokens=real(*[5.0] * 9)),
    "unknown input": datum(surprise=real(*[1.0] * 9)),
    "target beyond the vocabulary": datum(target_tokens=whole(*[VOCABULARY] * 9)),
    "target below zero": datum(target_tokens=whole(*[-1] * 9)),
    "NaN": datum(weights=real(*[math.nan] * 9)),
    "infinity": datum(weights=real(*[math.inf] * 9)),
    "no targets": datum_of([5, 6], {"weights": real(1.0, 1.0)}),
    "no tokens": datum_of([], {"target_tokens": whole(), "weights": real()}),
    "token beyond the vocabulary": datum_of([5, VOCABULARY], {"target_tokens": whole(5, 6)}),
    "token below zero": datum_of([5, -1], {"target_tokens": whole(5, 6)}),
    "token of 31 bits": datum_of([5, 2**31 - 1], {"target_tokens": whole(5, 6)}),
    "longer than the context": datum(length=CONTEXT + 1),
}


@pytest.mark.parametrize("name", SHAPES)
def test_data_the_model_cannot_use_is_a_failed_future(model: Model, name: str) -> None:
    """With good data before it in the batch, whose gradient must not stay."""
    said = failed(model.api, model.send_pass(datum(), SHAPES[name]))
    assert len(said) < 500


UNREADABLE: dict[str, wire.Datum] = {
    "dtype": datum(weights=wire.Tensor(dense=bytes(36), dtype=wire.DTYPE_UNSPECIFIED)),
    "unknown dtype": datum(weights=wire.Tensor(dense=bytes(36), dtype=77)),  # type: ignore[arg-type]
    "half a number": datum(weights=wire.Tensor(dense=bytes(35), dtype=wire.DTYPE_FLOAT32)),
    "shape": datum(weights=real(*[1.0] * 9, shape=(10,))),
    "negative shape": datum(weights=real(*[1.0] * 9, shape=(-3, -3))),
    "shape that overflows": datum(weights=real(*[1.0] * 9, shape=(2**62, 2**62, 4))),
    "image": wire.Datum(model_input=[wire.Chunk(image=wire.ImageChunk(data=b"x", format="png"))]),
    "sound": wire.Datum(model_input=[wire.Chunk(dmel=wire.DmelChunk(dmel=b"x"))]),
    "nothing": wire.Datum(model_input=[wire.Chunk()]),
    "three bytes of tokens": wire.Datum(model_input=[wire.Chunk(encoded_text=wire.EncodedTextChunk(tokens=b"abc"))]),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_data_nobody_can_read_is_400(model: Model, name: str) -> None:
    refused(model.send_pass(datum(), UNREADABLE[name]), said="data[1]")


def test_sparse_rows_that_lie_are_refused(model: Model) -> None:
    def sparse(crow: list[int], col: list[int], shape: tuple[int, int]) -> wire.Datum:
        csr = wire.SparseCsr(
            values=np.ones(len(col), "<i8").tobytes(),
            crow_indices=np.array(crow, "<i8").tobytes(),
            col_indices=np.array(col, "<i8").tobytes(),
        )
        return datum_of([5, 6], {"target_tokens": wire.Tensor(sparse_csr=csr, dtype=wire.DTYPE_INT64, shape=shape)})

    for crow, col, shape in (
        ([0, 1, 2], [0, 99], (2, 3)),
        ([0, 1, 2], [0, -1], (2, 3)),
        ([0, 2, 1], [0, 1], (2, 3)),
        ([5, 6, 7], [0, 1], (2, 3)),
        ([0, 1, 2**60], [0, 1], (2, 3)),
        ([0, 1, 2], [0, 1], (2, 2**40)),  # small on the wire, sixteen terabytes when filled
        ([0, 1, 2], [0, 1], (2, 2**62)),
    ):
        answer = model.send_pass(sparse(crow, col, shape))
        if answer.status_code == 200:
            failed(model.api, answer)
        else:
            refused(answer)
    model.works()


@pytest.mark.parametrize(
    ("loss", "fields"),
    [
        ("bogus", {}),
        ("", {}),
        ("x" * 100_000, {}),
        ("custom", {}),
        ("cross_entropy", {"loss_fn_config": {"surprise": 1.0}}),
        ("ppo", {}),
        ("cross_entropy", {"loss_fn_config_v2": {"beta": wire.LossConfigValue(text="x")}}),
    ],
    ids=["unknown", "none", "long", "custom", "setting", "inputs missing", "text"],
)
def test_a_loss_that_is_not_there_is_a_failed_future(model: Model, loss: str, fields: dict[str, Any]) -> None:
    answer = model.send_pass(loss=loss, **fields)
    said = failed(model.api, answer) if answer.status_code == 200 else refused(answer)
    assert len(said) <= 2000


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_setting_that_is_no_number_is_400(model: Model, value: float) -> None:
    refused(model.send_pass(loss="ppo", loss_fn_config={"clip_low_threshold": value}), said="finite")
    model.works()


def test_an_empty_batch_is_400(model: Model) -> None:
    message = wire.ForwardBackwardRequest(model_id=model.model_id, seq_id=next(model.numbers), loss_fn="cross_entropy")
    refused(model.send_bytes(message.SerializeToString()), said="empty")
    given = {"data": [], "loss_fn": "cross_entropy"}
    refused(model.send("forward_backward", forward_backward_input=given))
    model.works()


def test_a_pass_that_fails_leaves_no_gradient(api: Raw) -> None:
    """The step after it is the step without it."""
    lone, other = api.model(), api.model()
    failed(api, other.send_pass(datum(seed=5), SHAPES["NaN"]))
    for model in (lone, other):
        api.result(model.send_pass())
        api.result(model.step(1e-2))
    assert lone.loss(lone.send_pass()) == pytest.approx(other.loss(other.send_pass()), rel=1e-5)


# Large bodies


@pytest.mark.slow
def test_a_hundred_megabytes_are_answered(model: Model) -> None:
    noise = b"\xff" * 100_000_000
    refused(model.send_bytes(noise))
    targets = wire.Tensor(dense=noise, dtype=wire.DTYPE_INT64)
    failed(model.api, model.send_pass(datum_of([5, 6], {"target_tokens": targets})), "shape")
    tokens = wire.Chunk(encoded_text=wire.EncodedTextChunk(tokens=noise))
    refused(model.send_pass(wire.Datum(model_input=[tokens])), said="tokens")
    model.works()


def test_a_body_over_the_limit_is_413(model: Model) -> None:
    """Known by its length, or only on the way; before or after it is unpacked."""
    http = model.api.http
    million = bytes(1_000_000)
    refused(model.send_bytes(bytes(MAX_BODY + 1)), 413)
    for where in ("forward_backward", "asample", "optim_step", "telemetry"):
        parts = (million for _ in range(MAX_BODY // len(million) + 1))
        refused(http.post(f"/api/v1/{where}", content=parts, headers=JSON), 413)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    assert len(bomb) < 1 << 20
    refused(model.send_bytes(bomb, **{"content-encoding": "zstd"}), 413)
    model.works()


def test_calls_without_data_have_a_smaller_limit(api: Raw) -> None:
    """They are parsed before the key is looked at."""
    refused(api.http.post("/api/v1/create_session", content=b" " * (17 << 20), headers=JSON), 413)


def test_a_bomb_that_hides_its_size_is_refused(model: Model) -> None:
    packer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    bomb = packer.compress(bytes(1 << 28)) + packer.flush()
    refused(model.send_bytes(bomb, **{"content-encoding": "zstd"}))


@pytest.mark.parametrize("coding", ["zstd", "gzip", "br", "deflate", "zstd, gzip", "bogus"])
def test_a_body_that_is_not_packed_as_it_says_is_400(model: Model, coding: str) -> None:
    refused(model.send_bytes(valid_bytes(model), **{"content-encoding": coding}))
    refused(model.api.http.post("/api/v1/asample", content=b"{}", headers={"content-encoding": coding}))
    model.works()


def test_a_packed_body_is_read(model: Model) -> None:
    body = zstandard.compress(valid_bytes(model))
    assert "metrics" in model.api.result(model.send_bytes(body, **{"content-encoding": "zstd"}))


# Names


ODD_NAMES = [
    "../x",
    "a/b",
    "..",
    ".",
    "%2e%2e",
    "/etc/passwd",
    "a\0b",
    "x" * 129,
    "x" * 5000,
    "",
    "é",
    "a b",
    "a\n",
    "~",
]


@pytest.mark.parametrize("name", ODD_NAMES, ids=lambda name: repr(name[:12]))
def test_a_name_that_could_leave_the_folder_is_400(busy_server: Any, model: Model, name: str) -> None:
    refused(model.send("save_weights", path=name))
    refused(model.send("save_weights_for_sampler", path=name))
    refused(model.send("save_weights_external", path=name))
    refused(model.send("load_weights", path=f"tinker://{model.model_id}/weights/{name}", optimizer=True))
    refused(model.api.post("weights_info", tinker_path=f"tinker://{model.model_id}/weights/{name}"))
    assert not list(busy_server.checkpoints.glob("**/*passwd*"))


def test_names_like_these_left_no_folder_and_the_model_works(busy_server: Any, model: Model) -> None:
    model.works()
    model.save("x" * 128)
    root = busy_server.checkpoints
    assert {f.parent.parent.name for f in root.rglob("*@*") if f.is_dir()} <= {f.name for f in root.iterdir()}
    assert not list(busy_server.folder.glob("x*"))


ODD_PATHS = [
    "", "x", "/etc", "tinker://", "tinker://a", "tinker://a/b", "tinker://../weights/x", "file:///etc/passwd",
    "tinker://a/weights/x/../../y", "tinker://a/other/x",
]  # fmt: skip


@pytest.mark.parametrize("path", ODD_PATHS)
def test_a_path_of_another_form_is_400(model: Model, path: str) -> None:
    refused(model.send("load_weights", path=path, optimizer=False))
    refused(model.api.post("weights_info", tinker_path=path))
    refused(model.api.post("create_sampling_session", session_id=model.session_id, sampling_session_seq_id=70,
                           model_path=path))  # fmt: skip


@pytest.mark.parametrize("name", ["%2e%2e", "..%2f..%2fx", "%2fetc%2fpasswd", "a%00b", "%ff%fe", "x" * 3000, "%2e"])
def test_a_name_in_a_url_leads_nowhere(model: Model, name: str) -> None:
    for place in (
        f"training_runs/{model.model_id}/checkpoints/weights/{name}",
        f"training_runs/{name}",
        f"training_runs/{name}/checkpoints",
        f"sessions/{name}",
        f"samplers/{name}",
    ):
        for method in ("GET", "DELETE"):
            answer = model.api.http.request(method, f"/api/v1/{place}")
            assert answer.status_code in (400, 404, 405), f"{method} {place}: {answer.status_code}"
    answer = model.api.post(f"sessions/{name}/finish", reason={"type": "success"})
    assert answer.status_code in (400, 404)


# Order of requests


def test_a_used_number_with_another_payload_is_400(api: Raw) -> None:
    model = api.model()
    first = ok(model.send_pass(seq_id=1))
    assert ok(model.send_pass(seq_id=1)) == first
    refused(model.send_pass(datum(seed=9), seq_id=1), said="another request")
    refused(model.send_pass(seq_id=1, forward_only=True), said="another request")
    refused(model.step(seq_id=1), said="another request")
    stepped = ok(model.step(seq_id=2))
    assert ok(model.step(seq_id=2)) == stepped
    refused(model.step(5e-3, seq_id=2), said="another request")
    api.result(stepped)
    assert ok(model.step(seq_id=2)) == stepped


def test_a_request_is_the_same_in_whatever_order_its_maps_are_read() -> None:
    """Protobuf has another order in every process: what is sent again after a restart must have the same digest."""
    operation = pass_from_protobuf(ppo_pass("a:train:0", 1)).operation
    assert list(operation.data[0].loss_inputs) == ["advantages", "logprobs", "target_tokens"]
    assert list(operation.config) == ["clip_high_threshold", "clip_low_threshold"]


def ppo_pass(model_id: str, seq_id: int) -> bytes:
    inputs = {"target_tokens": whole(6, 7), "logprobs": real(-1.0, -2.0), "advantages": real(1.0, 1.0)}
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    message = wire.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, data=[datum_of([5, 6], inputs)], loss_fn="ppo", loss_fn_config=config
    )
    return message.SerializeToString(deterministic=True)


@pytest.mark.slow
def test_a_request_sent_again_after_a_restart_is_known(make_server: MakeServer) -> None:
    server = make_server()
    model = Raw(server).model()
    body = ppo_pass(model.model_id, 1)
    first = ok(model.send_bytes(body))
    for _ in range(4):
        server.restart()
        model.api = Raw(server)
        assert ok(model.send_bytes(body)) == first
    assert "metrics" in model.api.result(first)
    assert server.stop() == 0


def test_a_sampler_asked_for_again_is_the_first_one(api: Raw) -> None:
    """When the SDK repeats a request, its sampling session has another number."""
    model = api.model()
    kept = api.result(model.keep(4, seq_id=1))
    assert api.result(model.keep(5, seq_id=1)) == kept
    assert kept["sampling_session_id"] == f"{model.session_id}:sample:4"
    refused(api.get(f"samplers/{model.session_id}:sample:5"), 404)
    assert api.result(model.keep(5, seq_id=2))["sampling_session_id"] == f"{model.session_id}:sample:5"


def test_a_refused_number_notes_nothing(api: Raw) -> None:
    """The name stays free, the sampler is not there."""
    model = api.model()
    api.result(model.send_pass(seq_id=1))
    refused(model.send("save_weights", seq_id=1, path="x"), said="another request")
    refused(model.send("save_weights_for_sampler", seq_id=1, path="x"), said="another request")
    refused(model.send("save_weights_external", seq_id=1, path="x"), said="another request")
    refused(model.keep(3, seq_id=1), said="another request")
    refused(model.keep(3, seq_id=10**9), said="far ahead")
    refused(api.get(f"samplers/{model.session_id}:sample:3"), 404)
    assert api.result(model.send("save_weights", seq_id=2, path="x"))["path"].endswith("/x")
    refused(model.send("save_weights", seq_id=2, path="y"), said="another request")
    assert ok(api.get(f"training_runs/{model.model_id}/checkpoints"))["cursor"]["total_count"] == 1
    assert api.result(model.keep(3, seq_id=3))["sampling_session_id"]


@pytest.mark.parametrize("seq_id", [20_000, 2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**63, 2**100, -1, 0])
def test_a_number_out_of_reach_is_400(api: Raw, model: Model, seq_id: int) -> None:
    """A gap is settled number by number: nobody may ask for billions."""
    refused(model.step(seq_id=seq_id))
    refused(model.send("save_weights", seq_id=seq_id, path="far"))
    if 0 <= seq_id < 2**31:
        refused(model.send_pass(seq_id=seq_id))
    model.works()


def test_chunks_may_come_in_any_order_and_twice(api: Raw) -> None:
    """As the SDK sends them: the first one last. The step waits for all."""
    plain, mixed = api.model(), api.model()
    data = [datum(seed=s) for s in range(3)]
    in_order = [ok(plain.send_pass(data[i - 1], seq_id=i)) for i in (1, 2, 3)]
    ok(plain.step(1e-2, seq_id=4))
    reordered = {i: ok(mixed.send_pass(data[i - 1], seq_id=i)) for i in (2, 3, 2, 1, 3)}
    ok(mixed.step(1e-2, seq_id=4))
    for i in (1, 2, 3):
        here, there = api.result(in_order[i - 1]), api.result(reordered[i])
        assert here["metrics"] == pytest.approx(there["metrics"], rel=1e-5)
    after = [model.loss(model.send_pass(seq_id=5)) for model in (plain, mixed)]
    assert after[0] == pytest.approx(after[1], rel=1e-5)


def test_a_gap_is_settled_by_a_step_and_a_late_arrival_is_400(api: Raw) -> None:
    model = api.model()
    second = ok(model.send_pass(seq_id=2))
    stepped = ok(model.step(seq_id=4))
    assert "metrics" in api.result(stepped)
    assert "metrics" in api.result(second)
    refused(model.send_pass(seq_id=1), said="too late")
    refused(model.send("save_weights", seq_id=3, path="late"), said="too late")
    assert "metrics" in api.result(model.send_pass(seq_id=5))


def test_a_gap_before_a_pass_is_settled_by_time(api: Raw) -> None:
    model = api.model()
    later = ok(model.send_pass(seq_id=3))
    assert "metrics" in api.result(later)
    refused(model.send_pass(seq_id=1), said="too late")
    refused(model.send_pass(seq_id=2), said="too late")


def test_one_number_from_many_at_once_is_one_request(api: Raw) -> None:
    """All get one future for one of the payloads; the others are told."""
    model, answers = api.model(), []

    def send(seed: int) -> None:
        answers.append(model.send_pass(datum(seed=seed % 2), seq_id=1))

    threads = [threading.Thread(target=send, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    accepted = [a for a in answers if a.status_code == 200]
    assert len(accepted) == 4
    assert len({a.json()["request_id"] for a in accepted}) == 1
    assert all(a.status_code in (200, 400) for a in answers)
    assert "metrics" in api.result(accepted[0])


# Models and steps


def test_a_step_without_gradient_is_fine(api: Raw) -> None:
    model = api.model()
    before = model.loss(model.send_pass(forward_only=True))
    assert "metrics" in api.result(model.step(1e-2))
    assert model.loss(model.send_pass(forward_only=True)) == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize(
    "adam",
    [{"beta1": 1.0}, {"beta2": -0.1}, {"eps": -1.0}, {"weight_decay": -1.0}, {"learning_rate": -1.0}, {"beta1": 1e308}],
    ids=str,
)
def test_settings_no_optimizer_has_are_the_users_fault(model: Model, adam: dict[str, float]) -> None:
    failed(model.api, model.send("optim_step", adam_params=adam))
    model.works()


def test_another_optimizer_is_400(model: Model) -> None:
    api = model.api
    refused(model.send("optim_step", optimizer_params={"type": "dimuon", "learning_rate": 1e-3}), said="dimuon")
    refused(model.send("optim_step"))
    refused(model.send("optim_step", adam_params={}, optimizer_params={"type": "dimuon"}))
    response = {"session_id": model.session_id, "optimizer_config": {"type": "dimuon", "version": 1}}
    refused(api.post("create_model", model_seq_id=50, base_model=NAME, **response), said="dimuon")
    path = model.save("for-dimuon")
    refused(api.post("load_weights", model_seq_id=50, path=path, optimizer=False, **response), said="dimuon")
    model.works()


@pytest.mark.parametrize("rank", [0, -1, 257, 100_000, 2**31 - 1, 2**31, 1.5, "8"])
def test_a_rank_that_cannot_be_is_told(api: Raw, rank: Any) -> None:
    answer = api.create(api.session(), rank=rank)
    if answer.status_code == 200:
        failed(api, answer, "rank")
        refused(api.post("get_info", model_id=answer.json()["model_id"]), 404)
    else:
        refused(answer, said="rank")


def test_nothing_to_train_is_told(api: Raw) -> None:
    answer = api.create(api.session(), train_mlp=False, train_attn=False, train_unembed=False)
    failed(api, answer)


def test_a_model_nobody_serves_is_400(api: Raw) -> None:
    session = api.session()
    for name in ("gpt-5", "../Qwen", "Qwen/Qwen3-8B/x", "x" * 200):
        refused(api.create(session, base_model=name), said="not served here")
        refused(
            api.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=name),
            said="not served here",
        )
    assert "model_id" in api.result(api.create(session, 1, base_model=NAME + ":peft:262144"))


def test_a_checkpoint_that_is_not_there_or_does_not_fit_is_told(api: Raw) -> None:
    model, wide = api.model(), api.model(rank=8)
    path = model.save("here")
    refused(model.send("load_weights", path=path + "-not", optimizer=True), 404)
    failed(api, wide.send("load_weights", path=path, optimizer=True), "rank")
    sampler_path = api.result(model.send("save_weights_for_sampler", path="s"))["path"]
    failed(api, model.send("load_weights", path=sampler_path, optimizer=True), "optimizer")
    refused(model.send("save_weights", path="here"), said="already exists")
    model.works()
    wide.works()


def test_the_same_model_number_for_another_model_is_400(api: Raw) -> None:
    session = api.session()
    first = ok(api.create(session))
    assert ok(api.create(session)) == first
    refused(api.create(session, rank=8), said="another request")
    api.result(first)
    api.post("unload_model", model_id=first["model_id"])
    refused(api.create(session), said="next model_seq_id")
    refused(api.post("get_info", model_id=first["model_id"]), 404)


# Samples


BAD_SAMPLES: dict[str, tuple[int, dict[str, Any]]] = {
    "token below zero": (200, {"prompt": text(5, -1)}),
    "token beyond the vocabulary": (200, {"prompt": text(5, VOCABULARY)}),
    "no tokens": (200, {"prompt": text()}),
    "no chunks": (200, {"prompt": {"chunks": []}}),
    "as long as the context": (200, {"prompt": text(*[5] * CONTEXT)}),
    "top-k beyond the vocabulary": (200, {"topk_prompt_logprobs": VOCABULARY + 1}),
    "last_n beyond the prompt": (200, {"prompt_logprobs": True, "prompt_logprobs_last_n": 3}),
    "token of 40 bits": (400, {"prompt": text(2**40)}),
    "token is text": (400, {"prompt": {"chunks": [{"type": "encoded_text", "tokens": ["5"]}]}}),
    "two million tokens": (400, {"prompt": text(*[5] * 2_000_000)}),
    "no prompt": (400, {"prompt": None}),
    "image": (400, {"prompt": {"chunks": [{"type": "image", "data": "eA==", "format": "png"}]}}),
    "image somewhere": (400, {"prompt": {"chunks": [{"type": "image_asset_pointer", "location": "file:///etc"}]}}),
    "sound": (400, {"prompt": {"chunks": [{"type": "dmel", "dmel": "eA=="}]}}),
    "many samples": (400, {"num_samples": 10**9}),
    "no samples": (400, {"num_samples": 0}),
    "empty stop": (400, {"sampling_params": {"stop": ""}}),
    "empty stop in a list": (400, {"sampling_params": {"stop": ["a", ""]}}),
    "mixed stops": (400, {"sampling_params": {"stop": ["a", 1]}}),
    "stop is a number": (400, {"sampling_params": {"stop": 1}}),
    "no tokens wanted": (400, {"sampling_params": {"max_tokens": 0}}),
    "temperature": (400, {"sampling_params": {"temperature": -1.0}}),
    "temperature beyond all measure": (400, {"sampling_params": {"temperature": 1e308}}),
    "top_p": (400, {"sampling_params": {"top_p": 0.0}}),
    "top_k": (400, {"sampling_params": {"top_k": -2}}),
    "seed": (400, {"sampling_params": {"seed": 2**64}}),
    "negative number": (400, {"seq_id": -1}),
    "no number": (400, {"seq_id": None}),
    "number of 64 bits": (400, {"seq_id": 2**63}),
    "targets": (
        200,
        {"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [1, 2]}, "prompt": text(5, 6, 7)},
    ),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_sample_that_cannot_be_is_told(api: Raw, sampler: str, name: str) -> None:
    status, change = BAD_SAMPLES[name]
    body = {"sampling_session_id": sampler, "seq_id": 10 + list(BAD_SAMPLES).index(name), "prompt": text(5, 6, 7),
            "sampling_params": {"max_tokens": 2}, **change}  # fmt: skip
    answer = api.post("asample", **body)
    said = failed(api, answer) if status == 200 else refused(answer)
    assert len(said) < 500


@pytest.mark.parametrize(
    "stop", [["x" * 100_000], [str(i) for i in range(3000)], [-5], [10**9], [], ["\0"], ["é\u2028"], "\n\n"], ids=repr
)
def test_odd_stops_are_harmless(api: Raw, sampler: str, stop: Any) -> None:
    number = 1000 + abs(hash(repr(stop))) % 10**6
    answer = api.sample(sampler, number, sampling_params={"max_tokens": 2, "stop": stop})
    assert len(api.result(answer)["sequences"]) == 1


def test_a_sample_number_used_again_is_the_same_sample(api: Raw, sampler: str) -> None:
    first = ok(api.sample(sampler, 5))
    assert ok(api.sample(sampler, 5)) == first
    refused(api.sample(sampler, 5, max_tokens=3), said="another request")


def test_a_cancelled_sample_ends(api: Raw, sampler: str) -> None:
    said = ok(api.sample(sampler, 6, prompt=text(*[5] * 50), sampling_params={"max_tokens": 4000, "stop": []}))
    assert api.post("cancel_future", request_id=said["request_id"]).status_code == 204
    assert "cancelled" in failed(api, said)
    assert api.post("cancel_future", request_id=said["request_id"]).status_code == 204


# JSON and HTTP


BAD_JSON: dict[str, bytes] = {
    "nothing": b"",
    "noise": b"\xff\xfe\x00",
    "cut": b'{"session_id": "a',
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "null": b"null",
    "list": b"[]",
    "number": b"1",
    "NaN": b"NaN",
    "long number": b'{"model_id": ' + b"9" * 10_000 + b"}",
    "lone surrogate": b'{"session_id": "\\ud800", "model_id": "\\ud800", "user_metadata": {"\\ud800": "\\ud800"}}',
    "NUL": b'{"session_id": "a\\u0000", "model_id": "a\\u0000", "path": "a\\u0000"}',
    "wrong types": b'{"session_id": 1, "model_id": [], "seq_id": "1", "adam_params": {"learning_rate": NaN}}',
}
JSON_CALLS = ["session_heartbeat", "create_model", "optim_step", "save_weights", "load_weights", "asample", "forward",
              "retrieve_future", "retrieve_futures", "create_sampling_session", "telemetry", "copy_weights",
              "import_weights", "sessions/search"]  # fmt: skip


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_that_is_none_of_ours_is_400(api: Raw, name: str) -> None:
    for call in JSON_CALLS:
        answer = api.http.post(f"/api/v1/{call}", content=BAD_JSON[name], headers=JSON)
        if call == "sessions/search" and answer.status_code == 200:
            continue  # every field of it is optional
        refused(answer)


def test_nan_in_a_number_is_400(model: Model) -> None:
    for value in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = f'{{"model_id": "{model.model_id}", "seq_id": {next(model.numbers)}, "adam_params": {{"eps": {value}}}}}'
        refused(model.api.http.post("/api/v1/optim_step", content=body.encode(), headers=JSON))
    model.works()


def test_metadata_is_bounded(api: Raw) -> None:
    refused(api.post("create_session", user_metadata={"a": "x" * 100_000}))
    refused(api.post("create_session", tags=["x"] * 1000))
    refused(api.post("create_session", display_name="x" * 10_000))
    refused(api.post("telemetry", events=[{}] * 2000, session_id="x"))
    ok(api.post("create_session", user_metadata={"a": {"deep": [1, None]}}, brand_new_field=1))


def test_a_wrong_method_or_place_is_4xx(api: Raw) -> None:
    for method, place, status in (
        ("GET", "forward_backward", 405),
        ("PUT", "create_session", 405),
        ("DELETE", "sessions", 405),
        ("PATCH", "optim_step", 405),
        ("OPTIONS", "asample", 405),
        ("POST", "nothing_like_it", 404),
        ("GET", "", 404),
        ("POST", "optim_step/", 404),
    ):
        answer = api.http.request(method, f"/api/v1/{place}", follow_redirects=False)
        assert answer.status_code in (status, 307), f"{method} {place}: {answer.status_code}"
        assert answer.status_code not in RETRIED
    for what in ("x" * 50_000, "a?" + "x=1&" * 15_000):
        assert api.http.get(f"/api/v1/sessions/{what}").status_code in (400, 404, 414, 431)


def test_an_error_always_has_a_body(api: Raw) -> None:
    """The SDK takes an empty 400 for a proxy's mistake and tries again."""
    for call in JSON_CALLS:
        answer = api.http.post(f"/api/v1/{call}", content=b"{", headers=JSON)
        assert answer.status_code == 400
        assert int(answer.headers["content-length"]) > 10


def test_a_client_that_leaves_in_the_middle_is_no_trouble(busy_server: Any, api: Raw) -> None:
    import socket

    for said in (
        b"POST /api/v1/forward_backward HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\nabc",
        b"POST /api/v1/asample HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nff\r\nabc",
        b"POST /api/v1/create_session HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/9.9\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", busy_server.port)) as line:
            line.sendall(said)
    ok(api.get("sessions"))
    assert "Traceback" not in busy_server.log.read_text()


# Sessions that end


def test_a_finished_session_lets_everything_go(api: Raw) -> None:
    model = api.model()
    api.result(model.send_pass())
    kept = api.result(model.keep(0))["sampling_session_id"]
    done = {"reason": {"type": "success"}, "detail": None}
    assert api.post(f"sessions/{model.session_id}/finish", **done).status_code == 204
    assert api.post(f"sessions/{model.session_id}/finish", reason={"type": "errored"}).status_code == 204
    refused(api.post("session_heartbeat", session_id=model.session_id), 410)
    refused(model.send_pass(), 404, said="session may have ended")
    refused(api.sample(kept), 404)
    refused(api.create(model.session_id, 1), 404, said="ended")
    assert api.retrieve(f"train:{model.model_id}:1").status_code == 200  # what was done can still be read
    (found,) = ok(api.post("sessions/search", session_id=model.session_id))["sessions"]
    assert found["status"]["reason"]["type"] == "success"


def test_what_waits_when_a_session_ends_fails_with_the_reason(api: Raw) -> None:
    model = api.model()
    waiting = ok(model.send_pass(seq_id=2))
    sampler = api.base_sampler(model.session_id, 5)
    sampling = ok(api.sample(sampler, sampling_params={"max_tokens": 4000, "stop": []}))
    api.post(f"sessions/{model.session_id}/finish", reason={"type": "interrupted"})
    failed(api, waiting, "finished")
    failed(api, sampling, "finished")


def test_what_is_made_while_its_session_ends_does_not_stay(api: Raw, busy_server: Any) -> None:
    """At the same moment, from two connections: the new model is in the session and goes with it, or is refused."""
    made: list[str] = []

    def create(session: str) -> None:
        answer = api.create(session)
        sampler = api.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=NAME)
        assert {answer.status_code, sampler.status_code} <= {200, 404}
        made.extend([f"{session}:train:0", f"{session}:sample:0"])

    for _ in range(12):
        session = api.session()
        thread = threading.Thread(target=create, args=(session,))
        thread.start()
        assert api.post(f"sessions/{session}/finish", reason={"type": "success"}).status_code == 204
        thread.join()
    for model_id, sampler_id in zip(made[::2], made[1::2], strict=True):
        refused(api.post("get_info", model_id=model_id), 404)
        refused(api.get(f"samplers/{sampler_id}"), 404)


def test_a_session_without_heartbeats_expires(make_server: MakeServer) -> None:
    server = make_server(session_timeout_s=8, session_check_s=0.5)
    api = Raw(server)
    lively = api.session()
    model = api.model(rank=64)
    api.result(model.send_pass())
    kept = [api.result(model.keep(i))["sampling_session_id"] for i in range(3)]

    def held(*alive: str) -> set[str]:
        for session in (lively, *alive):
            ok(api.post("session_heartbeat", session_id=session))
        lines = [line.split() for line in server.metrics().splitlines() if not line.startswith("#")]
        return gone & {name.partition("{")[0] for name, value in lines if float(value) > 0}

    gone = {"palestra_models", "palestra_adapter_bytes", "palestra_kept_samplers", "palestra_sampler_bytes"}
    api.result(model.step(1e-2))  # what was kept of the old weights has memory of its own now
    server.until(lambda: held(model.session_id) == gone, timeout_s=60)

    def heartbeat() -> int:
        ok(api.post("session_heartbeat", session_id=lively))
        return api.post("get_info", model_id=model.model_id).status_code

    server.until(lambda: heartbeat() == 404, timeout_s=60)
    beat = {"session_id": model.session_id}
    server.until(lambda: "expired" in refused(api.post("session_heartbeat", **beat), 410), timeout_s=60)
    refused(model.send_pass(), 404, said="session may have ended")
    refused(api.sample(kept[0]), 404)
    refused(api.post("create_sampling_session", session_id=model.session_id, sampling_session_seq_id=9,
                     base_model=NAME), 404)  # fmt: skip

    api.result(api.sample(api.base_sampler(lively)))  # work, so that the engine tells how it is
    server.until(lambda: not held(), timeout_s=60)
    assert not list((server.state / "worker-Qwen_Qwen3-8B").rglob("*.snapshot"))
    assert not list((server.state / "worker-Qwen_Qwen3-8B").rglob("*.sampler"))
    assert psutil.pid_exists(server.worker_pid)
    assert server.stop() == 0


# Disks


def test_a_folder_that_cannot_be_written_is_a_failed_future_and_the_engine_goes_on(api: Raw, busy_server: Any) -> None:
    model, other = api.model(), api.model()
    blocked = busy_server.checkpoints / model.model_id.replace(":", "_")
    blocked.parent.mkdir(parents=True, exist_ok=True)
    blocked.write_text("in the way")
    for call, name in (("save_weights", "a"), ("save_weights_for_sampler", "b"), ("save_weights_external", "c")):
        result = api.result(model.send(call, path=name))
        assert result["category"] == "server"
        assert "could not be written" in result["error"]
    refused(api.post("weights_info", tinker_path=f"tinker://{model.model_id}/weights/a"), 404)
    assert ok(api.get(f"training_runs/{model.model_id}/checkpoints"))["checkpoints"] == []
    model.works()
    other.save("a")
    blocked.unlink()
    assert model.save("a").endswith("/a")  # the failed one is not in the way


@pytest.mark.slow
def test_a_full_disk_is_a_failed_future_and_the_engine_goes_on(make_server: MakeServer) -> None:
    """No file of the worker may grow: checkpoints fail, snapshots too, training does not."""
    server = make_server("models.0.snapshot_every_s=0.2")
    api, worker = Raw(server), psutil.Process(server.worker_pid)
    model = api.model(rank=64)
    model.works()
    worker.rlimit(psutil.RLIMIT_FSIZE, (64 << 10, -1))
    result = api.result(model.send("save_weights", path="full"))
    assert result["category"] == "server", result
    assert "could not be written" in result["error"]
    model.works()
    kept = api.result(model.keep(0))["sampling_session_id"]
    assert api.result(api.sample(kept))["sequences"]
    assert not [f for f in server.checkpoints.rglob("*") if f.is_file()]
    worker.rlimit(psutil.RLIMIT_FSIZE, (-1, -1))
    model.works()
    assert model.save("full").endswith("/full")
    assert worker.is_running()
    assert worker.pid == server.worker_pid
    assert server.stop() == 0
