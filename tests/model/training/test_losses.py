"""Each loss against the formula of the contract, written out again in plain Python; and through a whole model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from palestra.model import TrainItem, encode
from palestra.model.errors import DataError
from palestra.model.training.losses import LOSSES
from palestra.types import AdamParams, Datum, LossName

CLIPPED = ["ppo", "cispo", "gspo"]
DEFAULTS = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "dual_clip": 0.0},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}
OTHER = {
    "ppo": {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0},
    "cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.7},
    "gspo": {"clip_low_threshold": 0.97, "clip_high_threshold": 1.01},
}
DUAL = {"dual_clip": 1.5}
CASES = [*((name, None) for name in DEFAULTS), *OTHER.items(), ("ppo", DUAL)]
every_loss = pytest.mark.parametrize(("name", "config"), CASES, ids=lambda v: v if isinstance(v, str) else "")
ROWS = [7, 1, 12, 5]


def test_every_loss_of_the_contract_is_here():
    assert sorted(LOSSES) == sorted(DEFAULTS) == sorted(LossName)


# The formulas, in plain Python


def clip(ratio: float, x: dict, c: dict, i: int) -> float:
    low = x["clip_low_threshold"][i] if "clip_low_threshold" in x else c["clip_low_threshold"]
    high = x["clip_high_threshold"][i] if "clip_high_threshold" in x else c["clip_high_threshold"]
    return min(max(ratio, low), high)


def plain_loss(name: str, lp: np.ndarray, fixed: np.ndarray, x: dict, c: dict, rows: list[int]) -> list[float]:
    """Per position. `fixed` is lp where the gradient is stopped: the same numbers, held still by finite differences."""
    if name == "cross_entropy":
        return [-w * p for w, p in zip(x["weights"], lp, strict=True)]
    losses = []
    start = 0
    for n in rows:
        span = range(start, start + n)
        start += n
        if name == "gspo":
            mask = x.get("sequence_ratio_mask", (x["advantages"] != 0).astype(float))
            count = sum(mask[i] for i in span)
            mean = sum((fixed[i] - x["logprobs"][i]) * mask[i] for i in span) / count if count else 0.0
        for i in span:
            advantage, q = x["advantages"][i], x["logprobs"][i]
            if advantage == 0:
                losses.append(0.0)
            elif name == "importance_sampling":
                losses.append(-math.exp(lp[i] - q) * advantage)
            elif name == "ppo":
                ratio = math.exp(lp[i] - q)
                surrogate = min(ratio * advantage, clip(ratio, x, c, i) * advantage)
                is_bounded = advantage < 0 and c.get("dual_clip")
                losses.append(-max(surrogate, c["dual_clip"] * advantage) if is_bounded else -surrogate)
            elif name == "cispo":
                losses.append(-clip(math.exp(fixed[i] - q), x, c, i) * lp[i] * advantage)
            elif name == "dro":
                losses.append(-(lp[i] * advantage - 0.5 * c["beta"] * (lp[i] - q) ** 2))
            else:
                ratio = math.exp(mean) * math.exp(lp[i] - fixed[i])
                losses.append(-min(ratio * advantage, clip(ratio, x, c, i) * advantage))
    return losses


def random_inputs(name: str, seed: int, *, zeros: bool = True) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    n = sum(ROWS)
    lp = -rng.gamma(2.0, 1.0, n)
    if name == "cross_entropy":
        x = {"weights": rng.normal(size=n)}
    else:
        x = {"logprobs": lp + rng.normal(size=n) * 0.5, "advantages": rng.normal(size=n) * 2}
    if zeros:
        gate = "weights" if name == "cross_entropy" else "advantages"
        x[gate][rng.random(n) < 0.3] = 0.0
        x[gate][:: len(x[gate])] = 0.0
    return lp, x


def value_and_gradient(name, lp, x, config, *, dtype=torch.float64):
    loss = LOSSES[name]
    leaf = torch.tensor(lp, dtype=dtype).requires_grad_()
    inputs = {k: torch.tensor(v, dtype=dtype) for k, v in x.items()}
    value = loss.value(leaf, inputs, loss.settle(config), ROWS)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach().numpy(), gradient.numpy()


@every_loss
@pytest.mark.parametrize("seed", range(5))
def test_value_equals_the_plain_formula(name, config, seed):
    lp, x = random_inputs(name, seed)
    value, _ = value_and_gradient(name, lp, x, config)
    expected = plain_loss(name, lp, lp, x, DEFAULTS[name] | (config or {}), ROWS)
    np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12)


@every_loss
@pytest.mark.parametrize("seed", range(5))
def test_gradient_equals_finite_differences(name, config, seed):
    lp, x = random_inputs(name, seed)
    _, gradient = value_and_gradient(name, lp, x, config)
    settled = DEFAULTS[name] | (config or {})
    step = 1e-6
    for i in range(len(lp)):
        nudge = np.eye(len(lp))[i] * step
        up, down = (sum(plain_loss(name, lp + sign * nudge, lp, x, settled, ROWS)) for sign in (1, -1))
        assert gradient[i] == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", CLIPPED)
def test_clipping_really_happens_in_these_tests(name):
    """Else the formulas above would not have met their interesting half."""
    lp, x = random_inputs(name, 0)
    _, clipped = value_and_gradient(name, lp, x, OTHER[name])
    _, free = value_and_gradient(name, lp, x, {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9})
    different = clipped != free
    assert 0 < different.sum() < len(lp)


@pytest.mark.parametrize("name", [name for name in DEFAULTS if name != "cross_entropy"])
def test_the_last_bits_of_a_samplers_logprobs_do_not_reach_the_gradient(name):
    lp, x = random_inputs(name, 0)
    lp = lp.astype(np.float32)
    found = []
    for seed in range(3):
        rounding = np.random.default_rng(seed).uniform(-4e-6, 4e-6, len(lp)).astype(np.float32)
        found.append(value_and_gradient(name, lp, x | {"logprobs": lp + rounding}, None, dtype=torch.float32))
    for value, gradient in found[1:]:
        assert (value.tobytes(), gradient.tobytes()) == (found[0][0].tobytes(), found[0][1].tobytes())
    np.testing.assert_array_equal(found[0][1], -x["advantages"].astype(np.float32))  # a ratio of 1


def test_dual_clip_bounds_the_pull_on_tokens_that_got_likelier_despite_a_negative_advantage():
    lp = np.log([0.8, 0.8, 0.3, 0.3])
    x = {"logprobs": np.log([0.2, 0.2, 0.2, 0.2]), "advantages": np.array([-1.0, 1.0, -1.0, 1.0])}
    loss = LOSSES["ppo"]
    inputs = {k: torch.tensor(v) for k, v in x.items()}
    found = {}
    for bound in (0.0, 3.0):
        leaf = torch.tensor(lp).requires_grad_()
        value = loss.value(leaf, inputs, loss.settle({"dual_clip": bound}), [4])
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        found[bound] = (value.tolist(), gradient.tolist())
    # Ratios 4, 4, 1.5, 1.5: only the first is beyond 3 with a negative advantage.
    assert found[0.0] == (pytest.approx([4.0, -1.2, 1.5, -1.2]), pytest.approx([4.0, 0.0, 1.5, 0.0]))
    assert found[3.0] == (pytest.approx([3.0, -1.2, 1.5, -1.2]), pytest.approx([0.0, 0.0, 1.5, 0.0]))


@pytest.mark.parametrize("bound", [1.0, 0.5, -3.0])
def test_a_dual_clip_that_is_not_above_one_is_refused(bound):
    with pytest.raises(DataError, match="'dual_clip' must be above 1, or 0 to be off"):
        LOSSES["ppo"].settle({"dual_clip": bound})


@pytest.mark.parametrize("masked", ["all", "some", "none"])
def test_gspo_averages_over_its_mask(masked):
    lp, x = random_inputs("gspo", 3)
    rng = np.random.default_rng(1)
    mask = {"all": np.ones(len(lp)), "none": np.zeros(len(lp)), "some": (rng.random(len(lp)) < 0.6).astype(float)}[
        masked
    ]
    x["sequence_ratio_mask"] = mask
    wide = {"clip_low_threshold": 0.1, "clip_high_threshold": 10.0}
    value, gradient = value_and_gradient("gspo", lp, x, wide)
    np.testing.assert_allclose(value, plain_loss("gspo", lp, lp, x, wide, ROWS), rtol=1e-12)
    without = {k: v for k, v in x.items() if k != "sequence_ratio_mask"}
    assert not np.allclose(value, value_and_gradient("gspo", lp, without, wide)[0])
    np.testing.assert_allclose(gradient, value, rtol=1e-12)  # d/d lp of a ratio times A is itself


@pytest.mark.parametrize("name", CLIPPED)
def test_clip_thresholds_may_come_per_token_and_win_over_the_config(name):
    lp, x = random_inputs(name, 2)
    rng = np.random.default_rng(5)
    x["clip_low_threshold"] = rng.uniform(0.5, 1.0, len(lp))
    x["clip_high_threshold"] = rng.uniform(1.0, 1.3, len(lp))
    value, _ = value_and_gradient(name, lp, x, OTHER[name])
    np.testing.assert_allclose(value, plain_loss(name, lp, lp, x, OTHER[name], ROWS), rtol=1e-12)
    only_low = {k: v for k, v in x.items() if k != "clip_high_threshold"}
    value, _ = value_and_gradient(name, lp, only_low, OTHER[name])
    np.testing.assert_allclose(value, plain_loss(name, lp, lp, only_low, OTHER[name], ROWS), rtol=1e-12)
    constant = {k: np.full(len(lp), v) for k, v in OTHER[name].items()}
    same = value_and_gradient(name, lp, x | constant, None)
    for a, b in zip(same, value_and_gradient(name, lp, random_inputs(name, 2)[1], OTHER[name]), strict=True):
        assert np.array_equal(a, b)


# Positions that are switched off


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("extreme", [1e4, -1e4, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_switched_off_positions_contribute_exactly_nothing(name, extreme, dtype):
    lp, x = random_inputs(name, 4)
    gate = "weights" if name == "cross_entropy" else "advantages"
    off = x[gate] == 0
    assert 3 < off.sum() < len(off) - 3
    quiet = value_and_gradient(name, lp, x, None, dtype=dtype)
    if "logprobs" in x:
        x["logprobs"][off] = extreme
    else:
        lp[off] = -abs(extreme)
    value, gradient = value_and_gradient(name, lp, x, None, dtype=dtype)
    assert (value[off] == 0).all()
    assert (gradient[off] == 0).all()
    assert np.array_equal(value[~off], quiet[0][~off])
    assert np.array_equal(gradient[~off], quiet[1][~off])


@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_switched_off_positions_contribute_nothing_even_inside_gspos_mask(extreme):
    """The mask lets them into the ratio of their sequence; that sequence has no advantage anywhere."""
    lp, x = random_inputs("gspo", 4)
    first = slice(0, ROWS[0])
    x["advantages"][first] = 0.0
    x["logprobs"][first] = extreme
    x["sequence_ratio_mask"] = np.ones(len(lp))
    value, gradient = value_and_gradient("gspo", lp, x, None, dtype=torch.float32)
    assert (value[first] == 0).all()
    assert (gradient[first] == 0).all()
    assert np.isfinite(value).all()
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", CLIPPED)
def test_ratio_beyond_the_range_of_floats_is_clipped_like_any_other(name):
    lp, x = random_inputs(name, 4, zeros=False)
    x["advantages"] = np.abs(x["advantages"]) + 0.1
    x["logprobs"][:3] = -1e4
    value, gradient = value_and_gradient(name, lp, x, None, dtype=torch.float32)
    high = DEFAULTS[name]["clip_high_threshold"]
    factor = lp[:3] if name == "cispo" else 1.0
    np.testing.assert_allclose(value[:3], -high * factor * x["advantages"][:3], rtol=1e-6)
    slope = -high * x["advantages"][:3] if name == "cispo" else np.zeros(3)
    np.testing.assert_allclose(gradient[:3], slope, rtol=1e-6)


@pytest.mark.parametrize("name", DEFAULTS)
def test_dummies_at_prompt_positions_change_nothing_in_a_model(get_bench, name):
    """Targets 0 and extreme log-probabilities where the weight is 0: the same loss and gradient to the bit."""
    n, results = 24, []
    for dummy in (0.0, 1e4, -1e4):
        bench = get_bench()
        adapter = bench.adapter()
        tokens, targets, gate, q = bench.tokens(n), bench.tokens(n), bench.rng.normal(size=n), np.full(n, -5.0)
        gate[:10], q[:10] = 0.0, dummy
        targets[:10] = [0] * 10
        inputs = {"weights": gate} if name == "cross_entropy" else {"advantages": gate, "logprobs": q}
        datum = Datum.of_tokens(
            tokens, target_tokens=encode(np.array(targets)), **{k: encode(v) for k, v in inputs.items()}
        )
        result = bench.trainer.forward_backward([TrainItem(adapter, datum, name)])[0]
        results.append((result.loss, bench.gradient(adapter)))
    assert math.isfinite(results[0][0])
    assert results[0][0] != 0
    for loss, gradient in results[1:]:
        assert loss == results[0][0]
        assert all(torch.equal(gradient[k], results[0][1][k]) for k in gradient)


@pytest.mark.parametrize("name", DEFAULTS)
def test_datum_that_is_switched_off_entirely_has_loss_and_gradient_zero(bench, name):
    adapter = bench.adapter()
    zeros = (
        {"weights": np.zeros(9)} if name == "cross_entropy" else {"advantages": np.zeros(9), "logprobs": np.zeros(9)}
    )
    result = bench.trainer.forward_backward([TrainItem(adapter, bench.datum(9, **zeros), name)])[0]
    assert result.loss == 0.0
    assert not any(g.any() for g in bench.gradient(adapter).values())
    assert (result.logprobs < 0).all()


# Through a whole model, against autograd through transformers and PEFT


def torch_loss(name: str, lp: torch.Tensor, x: dict[str, torch.Tensor], c: dict) -> torch.Tensor:
    """One datum, every position switched on."""
    if name == "cross_entropy":
        return -(x["weights"] * lp).sum()
    q, a = x["logprobs"], x["advantages"]
    ratio = (lp - q).exp()
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "dro":
        return -(lp * a - 0.5 * c["beta"] * (lp - q) ** 2).sum()
    low, high = c["clip_low_threshold"], c["clip_high_threshold"]
    if name == "cispo":
        return -(ratio.clamp(low, high).detach() * lp * a).sum()
    if name == "gspo":
        ratio = (lp - q).mean().exp().detach() * (lp - lp.detach()).exp()
    return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()


@pytest.mark.parametrize("name", DEFAULTS)
def test_gradient_through_the_model_equals_autograd_through_peft(bench, tmp_path, name):
    adapter, lengths = bench.adapter(noise=0.05), (9, 30, 2)
    drafts = [bench.datum(n) for n in lengths]
    drawn = [r.logprobs for r in bench.trainer.forward([TrainItem(adapter, d) for d in drafts])]
    raw, items = [], []
    for draft, lp in zip(drafts, drawn, strict=True):
        n = len(lp)
        x = {"logprobs": lp + bench.rng.normal(size=n) * 0.4, "advantages": bench.rng.normal(size=n)}
        if name == "cross_entropy":
            x = {"weights": bench.rng.normal(size=n)}
        x = {k: v.astype(np.float32) for k, v in x.items()}
        datum = Datum(chunks=draft.chunks, loss_inputs={k: encode(v) for k, v in x.items()})
        datum.loss_inputs["target_tokens"] = draft.loss_inputs["target_tokens"]
        items.append(TrainItem(adapter, datum, name, OTHER.get(name, {})))
        raw.append({k: torch.from_numpy(v) for k, v in x.items()})
    results = bench.trainer.forward_backward(items)

    model = bench.peft(adapter, tmp_path / "a")
    total = torch.zeros(())
    for item, x, result in zip(items, raw, results, strict=True):
        targets = torch.from_numpy(np.frombuffer(item.datum.loss_inputs["target_tokens"].data, "<i8").copy())
        logits = model(torch.tensor([item.datum.chunks[0].tokens])).logits[0]
        lp = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        loss = torch_loss(name, lp, x, OTHER.get(name, {}))
        assert result.loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-4)
        total = total + loss
    total.backward()
    truth = {n.replace(".default.", "."): p.grad for n, p in model.named_parameters() if p.requires_grad}
    for key, gradient in bench.gradient(adapter).items():
        expected = truth[f"base_model.model.{key}"]
        assert (gradient - expected).norm() < 1e-4 * expected.norm(), key


def test_different_losses_and_settings_share_one_batch(bench):
    adapters = [bench.adapter(seed=i) for i in range(4)]
    items = []
    for i, (name, config) in enumerate([*CASES, *CASES]):
        n = 5 + 3 * i % 17
        x = {"advantages": bench.rng.normal(size=n), "logprobs": -5 + bench.rng.normal(size=n) * 0.3}
        x["advantages"][: i % 4] = 0
        if name == "cross_entropy":
            x = {"weights": x["advantages"]}
        items.append(TrainItem(adapters[i % 4], bench.datum(n, **x), name, config or {}))
    together = bench.trainer.forward_backward(items)
    gradients = [bench.gradient(a) for a in adapters]
    bench.trainer.optim_step({a: AdamParams(learning_rate=0.0) for a in adapters})
    for item, result in zip(items, together, strict=True):
        alone = bench.trainer.forward_backward([item])[0]
        assert alone.loss == pytest.approx(result.loss, rel=1e-5, abs=1e-5)
        assert alone.metrics.keys() == result.metrics.keys()
    for adapter, truth in zip(adapters, gradients, strict=True):
        whole = torch.cat([g.flatten() for g in truth.values()]).norm()
        for name, gradient in bench.gradient(adapter).items():
            assert (gradient - truth[name]).norm() <= 1e-5 * whole
