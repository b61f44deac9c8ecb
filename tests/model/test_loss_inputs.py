"""What a loss takes and gives back: wide and sparse tensors, log-probabilities, metrics, and what it refuses."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from palestra.model import DataError, TrainItem, combine_metrics, encode
from palestra.types import AdamParams, Datum, LossName, TensorData

RL = ["importance_sampling", "ppo", "cispo", "dro", "gspo"]


# Wide targets and sparse tensors


def csr(dense: np.ndarray, keep: np.ndarray | None = None) -> TensorData:
    """As the SDK sends it; `keep` lists the stored cells (those that are not 0)."""
    keep = dense != 0 if keep is None else keep
    crow = np.concatenate([[0], keep.sum(1).cumsum()]).astype("<i8")
    whole = encode(dense)
    return TensorData(
        data=encode(dense[keep]).data,
        dtype=whole.dtype,
        shape=dense.shape,
        crow_indices=crow.tobytes(),
        col_indices=np.nonzero(keep)[1].astype("<i8").tobytes(),
    )


def wide_case(bench, n=14, k=3):
    tokens, targets = bench.tokens(n), bench.rng.integers(1, bench.vocab, (n, k))
    weights = bench.rng.normal(size=(n, k)).astype(np.float32)
    off = bench.rng.random((n, k)) < 0.6
    off[3] = True
    weights[off] = 0.0
    targets[off] = 0  # what CSR does to cells that are not listed
    assert (weights < 0).any()
    return tokens, targets, weights


def test_wide_targets_are_the_sum_of_their_columns(bench):
    adapter = bench.adapter()
    tokens, targets, weights = wide_case(bench)
    wide = bench.trainer.forward_backward(
        [TrainItem(adapter, Datum.of_tokens(tokens, target_tokens=encode(targets), weights=encode(weights)))]
    )[0]
    assert wide.logprobs.shape == targets.shape
    gradient = bench.gradient(adapter)
    bench.trainer.optim_step({adapter: AdamParams(learning_rate=0.0)})
    columns = [
        bench.trainer.forward_backward(
            [
                TrainItem(
                    adapter, Datum.of_tokens(tokens, target_tokens=encode(targets[:, j]), weights=encode(weights[:, j]))
                )
            ]
        )[0]
        for j in range(targets.shape[1])
    ]
    assert wide.loss == pytest.approx(sum(c.loss for c in columns), rel=1e-5)
    assert np.abs(wide.logprobs - np.stack([c.logprobs for c in columns], 1)).max() < 1e-5
    for name, summed in bench.gradient(adapter).items():
        assert (gradient[name] - summed).norm() < 1e-5 * summed.norm()


def test_wide_logprobs_equal_transformers(bench):
    tokens, targets, _ = wide_case(bench)
    with torch.no_grad():
        truth = torch.log_softmax(bench.reference()(torch.tensor([tokens])).logits[0], -1)
    found = bench.trainer.forward([TrainItem(None, Datum.of_tokens(tokens, target_tokens=encode(targets)))])[0]
    assert np.abs(found.logprobs - truth.gather(1, torch.from_numpy(targets)).numpy()).max() < 1e-4


def test_sparse_targets_and_weights_equal_dense(bench):
    tokens, targets, weights = wide_case(bench)
    one, other = bench.adapter(seed=1), bench.adapter(seed=1)
    dense = Datum.of_tokens(tokens, target_tokens=encode(targets), weights=encode(weights))
    sparse = Datum.of_tokens(tokens, target_tokens=csr(targets), weights=csr(weights))
    results = [bench.trainer.forward_backward([TrainItem(a, d)])[0] for a, d in ((one, dense), (other, sparse))]
    assert results[0].loss == results[1].loss
    assert np.array_equal(results[0].logprobs, results[1].logprobs)
    a, b = bench.gradient(one), bench.gradient(other)
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_different_widths_share_a_request(bench):
    adapter = bench.adapter()
    tokens, targets, weights = wide_case(bench)
    wide = TrainItem(adapter, Datum.of_tokens(tokens, target_tokens=encode(targets), weights=encode(weights)))
    one_wide = TrainItem(adapter, Datum.of_tokens(tokens, target_tokens=encode(targets[:, :1])))
    plain = bench.items([adapter], [11])[0]
    results = bench.trainer.forward_backward([wide, plain, one_wide, wide])
    assert [r.logprobs.shape for r in results] == [(14, 3), (11,), (14, 1), (14, 3)]


def test_negative_weights_turn_loss_and_gradient_around(bench):
    adapter = bench.adapter()
    datum = bench.datum(12)
    weights = np.frombuffer(datum.loss_inputs["weights"].data, "<f4")
    turned = Datum(chunks=datum.chunks, loss_inputs={**datum.loss_inputs, "weights": encode(-weights)})
    a, b = bench.trainer.forward_backward([TrainItem(adapter, datum), TrainItem(adapter, turned)])
    assert a.loss == -b.loss != 0
    whole = torch.cat([g.flatten() for g in bench.gradient(adapter).values()])
    assert whole.abs().max() < 1e-4, "the two cancel"


def test_missing_weights_are_ones(bench):
    tokens = bench.tokens(9)
    targets = encode(np.array(bench.tokens(9)))
    ones = Datum.of_tokens(tokens, target_tokens=targets, weights=encode(np.ones(9)))
    a, b = bench.trainer.forward(
        [TrainItem(None, Datum.of_tokens(tokens, target_tokens=targets)), TrainItem(None, ones)]
    )
    assert a.loss == b.loss == pytest.approx(-a.logprobs.sum(), rel=1e-6)


# Outputs


@pytest.mark.parametrize("name", LossName)
def test_outputs_are_logprobs_like_the_targets_and_metrics_with_reductions(bench, name):
    adapter = bench.adapter()
    x = {"advantages": np.ones(8), "logprobs": np.full(8, -6.0)}
    if name == "cross_entropy":
        x = {"weights": np.ones(8)}
    item = TrainItem(adapter, bench.datum(8, **x), name)
    for result in (*bench.trainer.forward([item]), *bench.trainer.forward_backward([item])):
        assert result.logprobs.shape == (8,)
        assert result.logprobs.dtype == np.float32
        assert result.metrics["loss:sum"] == result.loss
        for metric, value in result.metrics.items():
            assert re.fullmatch(r"[^:]+:(sum|min|max|mean)", metric)
            assert isinstance(value, float)


def test_metrics_tell_how_far_the_sampler_is_and_what_was_clipped(bench):
    draft = bench.datum(6)
    lp = bench.trainer.forward([TrainItem(None, draft)])[0].logprobs
    shift = np.array([0.0, 0.1, -0.5, 0.5, 1.0, 3.0])  # lp - q
    advantages = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    inputs = {"logprobs": encode(lp - shift), "advantages": encode(advantages)}
    datum = Datum(chunks=draft.chunks, loss_inputs={"target_tokens": draft.loss_inputs["target_tokens"], **inputs})
    metrics = bench.trainer.forward([TrainItem(None, datum, "ppo")])[0].metrics
    assert metrics["positions:sum"] == 5
    assert metrics["kl_sampler_trainer:sum"] == pytest.approx(-1.1, abs=1e-5)
    assert metrics["ratio:max"] == pytest.approx(math.e, rel=1e-5)
    assert metrics["clipped:sum"] == 3


def test_metrics_combine_by_the_reduction_in_their_names():
    parts = [{"loss:sum": 1.0, "ratio:max": 3.0}, {"loss:sum": 2.5, "ratio:max": 2.0, "positions:sum": 4.0}]
    assert combine_metrics(parts) == {"loss:sum": 3.5, "ratio:max": 3.0, "positions:sum": 4.0}
    assert combine_metrics([]) == {}


# Refusals


def run(bench, loss="cross_entropy", config=None, **inputs: TensorData):
    return bench.trainer.forward([TrainItem(None, Datum.of_tokens([1, 2, 3], **inputs), loss, config or {})])


TARGETS = encode(np.array([2, 3, 4]))
FLOATS = encode(np.zeros(3))


@pytest.mark.parametrize(
    ("name", "nearest"), [("crossentropy", "cross_entropy"), ("PPO", ""), ("grpo", "gspo"), ("cisp", "cispo")]
)
def test_unknown_loss_offers_the_nearest_and_lists_all(bench, name, nearest):
    with pytest.raises(DataError) as found:
        run(bench, name, target_tokens=TARGETS)
    message = str(found.value)
    assert f"unknown loss {name!r}" in message
    assert f"did you mean {nearest!r}" in message or not nearest
    assert "cross_entropy, importance_sampling, ppo, cispo, dro, gspo" in message


@pytest.mark.parametrize(("name", "known"), [("ppo", "clip_low_threshold"), ("cross_entropy", "none"), ("dro", "beta")])
def test_unknown_setting_lists_those_the_loss_has(bench, name, known):
    inputs = {} if name == "cross_entropy" else {"logprobs": FLOATS, "advantages": FLOATS}
    with pytest.raises(DataError, match=rf"loss '{name}' has no setting 'epsilon'; it knows: .*{known}"):
        run(bench, name, {"epsilon": 0.2}, target_tokens=TARGETS, **inputs)


@pytest.mark.parametrize("missing", ["target_tokens", "logprobs", "advantages"])
@pytest.mark.parametrize("name", RL)
def test_missing_input_is_named(bench, name, missing):
    inputs = {"target_tokens": TARGETS, "logprobs": FLOATS, "advantages": FLOATS}
    del inputs[missing]
    with pytest.raises(DataError, match=rf"'{missing}'"):
        run(bench, name, **inputs)


@pytest.mark.parametrize("extra", ["mask", "advantages", "sequence_ratio_mask"])
def test_extra_input_is_named_with_those_known(bench, extra):
    with pytest.raises(DataError, match=rf"'cross_entropy' has no loss input '{extra}' .*target_tokens, weights"):
        run(bench, target_tokens=TARGETS, **{extra: FLOATS})


def raw(data: bytes, dtype="float32", shape=(3,), **sparse) -> TensorData:
    return TensorData(data=data, dtype=dtype, shape=shape, **sparse)


def sparse_of(crow, col, n=1, shape=(3, 2)) -> TensorData:
    return raw(
        np.ones(n, "<f4").tobytes(),
        shape=shape,
        crow_indices=np.array(crow, "<i8").tobytes(),
        col_indices=np.array(col, "<i8").tobytes(),
    )


WIDE = encode(np.ones((3, 2), np.int64))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"target_tokens": encode(np.array([1, 2]))}, r"target_tokens has shape \[2\].*3 tokens.*\[3\] or \[3, K\]"),
        ({"target_tokens": encode(np.zeros((3, 0), np.int64))}, r"target_tokens has shape \[3, 0\]"),
        ({"target_tokens": encode(np.zeros((3, 1, 1), np.int64))}, r"target_tokens has shape \[3, 1, 1\]"),
        ({"target_tokens": encode(np.array([1.0, 2.0, 3.0]))}, "target_tokens: dtype must be int64, found float32"),
        ({"target_tokens": encode(np.array([1, 2, 512]))}, "target_tokens: token id 512 is outside the vocabulary"),
        ({"target_tokens": encode(np.array([1, -1, 2]))}, "target_tokens: token id -1"),
        (
            {"target_tokens": TARGETS, "weights": encode(np.ones(2))},
            r"'weights' has shape \[2\], target_tokens has \[3\]",
        ),
        ({"target_tokens": TARGETS, "weights": encode(np.ones((3, 1)))}, r"'weights' has shape \[3, 1\]"),
        (
            {"target_tokens": WIDE, "weights": encode(np.ones(3))},
            r"'weights' has shape \[3\], target_tokens has \[3, 2\]",
        ),
        ({"target_tokens": TARGETS, "weights": encode(np.array([1, np.nan, 1]))}, "'weights' holds NaN or infinity"),
        ({"target_tokens": TARGETS, "weights": encode(np.array([1, np.inf, 1]))}, "'weights' holds NaN or infinity"),
        ({"target_tokens": TARGETS, "weights": raw(b"12345")}, "weights: 5 bytes do not fill"),
        ({"target_tokens": TARGETS, "weights": raw(b"1234" * 2)}, r"weights: 8 bytes do not fill shape \[3\]"),
        (
            {"target_tokens": WIDE, "weights": sparse_of([0, 1, 1], [0])},
            "weights: sparse indices do not describe a 3 x 2",
        ),
        ({"target_tokens": WIDE, "weights": sparse_of([0, 1, 1, 1], [2])}, "weights: sparse indices"),
        ({"target_tokens": WIDE, "weights": sparse_of([0, 1, 1, 2], [0])}, "weights: sparse indices"),
        ({"target_tokens": WIDE, "weights": sparse_of([0, 2, 1, 1], [0])}, "weights: sparse indices"),
        (
            {"target_tokens": WIDE, "weights": sparse_of([0, 1, 1, 1], [0], shape=(3,))},
            "weights: sparse tensors need two",
        ),
        ({"target_tokens": WIDE, "weights": sparse_of([], [], n=0)}, "weights: sparse indices"),
    ],
)
def test_malformed_input_is_named_with_what_it_must_be(bench, inputs, message):
    with pytest.raises(DataError, match=message):
        run(bench, **inputs)


# Targets that do not count, as other libraries mark them


def ignoring_case(bench, loss, target):
    """`target` where weight or advantage is 0, at the first, the last and some positions between."""
    rng = np.random.default_rng(3)
    gate = "weights" if loss == "cross_entropy" else "advantages"
    tokens, targets = rng.integers(1, bench.vocab, (2, 12))
    inputs = {gate: rng.normal(size=12)}
    off = np.isin(np.arange(12), (0, 1, 5, 11))
    targets[off], inputs[gate][off] = target, 0.0
    if loss != "cross_entropy":
        inputs["logprobs"] = -rng.gamma(2.0, 1.0, 12)
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = (~off).astype(float)
    tensors = {name: encode(value) for name, value in {"target_tokens": targets, **inputs}.items()}
    return Datum.of_tokens(tokens.tolist(), **tensors)


@pytest.mark.parametrize("loss", LossName)
def test_minus_100_where_nothing_counts_is_any_other_token(bench, loss):
    found = []
    for target in (-100, 7):
        adapter = bench.adapter(seed=1)
        (result,) = bench.trainer.forward_backward([TrainItem(adapter, ignoring_case(bench, loss, target), loss)])
        found.append((result, bench.gradient(adapter)))
    (ignored, gradient), (dummy, expected) = found
    assert ignored.loss == dummy.loss != 0
    assert ignored.metrics == dummy.metrics
    assert np.isfinite(ignored.logprobs).all()
    assert all(torch.equal(gradient[name], expected[name]) for name in expected)
    assert any(one.any() for one in expected.values())


@pytest.mark.parametrize("form", [encode, csr], ids=["dense", "sparse"])
def test_minus_100_may_stand_in_single_cells_of_wide_targets(bench, form):
    tokens, targets, weights = wide_case(bench)
    results, gradients = [], []
    for target in (-100, 5):
        adapter = bench.adapter(seed=1)
        cells = np.where(weights == 0, target, targets)
        datum = Datum.of_tokens(tokens, target_tokens=form(cells), weights=form(weights))
        results += bench.trainer.forward_backward([TrainItem(adapter, datum)])
        gradients.append(bench.gradient(adapter))
    assert results[0].loss == results[1].loss != 0
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


ZEROS = encode(np.zeros(3))


@pytest.mark.parametrize(
    ("loss", "inputs", "message"),
    [
        (
            "cross_entropy",
            {"weights": encode(np.array([1, 0.5, 1]))},
            r"target_tokens\[1\] is -100.*weights\[1\] is 0.5",
        ),
        ("cross_entropy", {}, r"target_tokens\[1\] is -100.*weights\[1\] is 1; send 0"),
        ("ppo", {"logprobs": ZEROS, "advantages": encode(np.array([0, -2.0, 0]))}, r"advantages\[1\] is -2"),
        (
            "gspo",
            {"logprobs": ZEROS, "advantages": ZEROS, "sequence_ratio_mask": encode(np.ones(3))},
            r"sequence_ratio_mask\[1\] is 1",
        ),
    ],
    ids=["weight", "no weights", "advantage", "ratio mask"],
)
def test_minus_100_that_counts_is_named_with_its_place(bench, loss, inputs, message):
    with pytest.raises(DataError, match=message):
        run(bench, loss, target_tokens=encode(np.array([1, -100, 2])), **inputs)


@pytest.mark.parametrize("target", [-1, -99, -101, -(2**62)])
def test_no_other_negative_target_is_taken(bench, target):
    with pytest.raises(DataError, match=f"token id {target} is outside the vocabulary"):
        run(bench, target_tokens=encode(np.array([1, target, 2])), weights=encode(np.array([1, 0, 1])))


def test_wide_targets_are_for_cross_entropy_alone(bench):
    wide = encode(np.zeros((3, 2)))
    with pytest.raises(DataError, match=r"target_tokens has shape \[3, 2\].*must be \[3\]$"):
        run(bench, "ppo", target_tokens=WIDE, logprobs=wide, advantages=wide)


def test_tensor_without_a_shape_is_one_dimensional(bench):
    plain = run(bench, target_tokens=TARGETS)[0]
    shapeless = run(bench, target_tokens=raw(TARGETS.data, "int64", ()))[0]
    assert np.array_equal(plain.logprobs, shapeless.logprobs)
