"""Every kind of layer behind a real server: what is killed ends at the same bits, and tenants do not disturb others.

The other tests of servers use Qwen3. These train and sample models with Mamba-2 states, keys that layers share,
compressed rows and experts, with plain weights and with weights of 8 and 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.model.conftest import GEMMA4
from tests.server.conftest import NAME
from tests.server.test_faults import Run, assert_same_bits, batch, kill_worker, weights

STEPS = 2
RANKS = (4, 8)
LOGPROB = 5e-5  # found 1e-5 at most: Adam divides by roots of small numbers, so weights differ by more than gradients
PROMPT = [5, 17, 301, 44, 260, 81, 12, 9]
OPTIONS = {"gemma4": {"tie": True, "overrides": GEMMA4}, "gemma3": {"tie": True, "overrides": {"sliding_window": 8}}}
CASES = [
    ("nemotron_h", "nf4"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("nemotron_h", None),
            ("gemma4", None),
            ("gemma4", "int4"),
            ("gemma4_moe", "int8"),
            ("glm4_moe_lite", None),
            ("deepseek_v3", None),
            ("deepseek_v3", "fp8"),
            ("gemma3", None),
            ("gemma3", "nf4"),
            ("glm4_moe", "int8"),
            ("olmo3", None),
            ("phi3", "int8"),
            ("qwen3_5", "int4"),
            ("qwen3_5_moe", None),
            ("gpt_oss", "mxfp4"),
        )
    ),
]
"""Families, and what their weights are kept in. Every day there is one that has almost everything: states, attention,
experts and 4 bits."""


@dataclass
class TenantRun(Run):
    """What a tenant has seen, in the order in which it asked."""

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def train_and_sample(
    client: tinker.ServiceClient, tenant: int = 0, *, on_step: Callable[[int], None] = lambda step: None
) -> TenantRun:
    """Steps of two passes each, and samples from the weights behind each step. `on_step` is called while passes, the
    step and the samples of the step before are under way."""
    model = client.create_lora_training_client(base_model=NAME, rank=RANKS[tenant], seed=7 + tenant)
    params = types.SamplingParams(max_tokens=12, seed=3, stop=[])
    run, sampled = TenantRun(), []
    for step in range(STEPS):
        passes = [model.forward_backward(batch(2 * step + i, tenant), "cross_entropy") for i in (0, 1)]
        stepped = model.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))
        on_step(step)
        run.losses += [p.result(timeout=100).metrics["loss:sum"] for p in passes]
        stepped.result(timeout=100)
        sampler = model.save_weights_and_get_sampling_client()
        sampled.append(sampler.sample(types.ModelInput.from_ints(PROMPT), 2, params))
    sequences = [sequence for future in sampled for sequence in future.result(timeout=100).sequences]
    run.tokens = [sequence.tokens for sequence in sequences]
    run.logprobs = [number for sequence in sequences for number in sequence.logprobs or []]
    run.path = model.save_state("end").result(timeout=100).path
    return run


@pytest.mark.parametrize(("family", "form"), CASES)
def test_a_killed_engine_and_another_tenant_leave_no_trace(
    family: str, form: str | None, make_server: Callable[..., Any], random_model: Callable[..., Path]
) -> None:
    """The same work three times on one server: each tenant alone, one of them with the engine killed in the middle, and
    both at once, with adapters of different ranks."""
    form_setting = () if form is None else (f"models.0.weights={form}",)
    model = random_model(family, **OPTIONS.get(family, {}))
    server = make_server("models.0.snapshot_every_s=0.3", *form_setting, model=model)
    alone = [train_and_sample(server.client(), tenant) for tenant in (0, 1)]

    killed = train_and_sample(server.client(), on_step=lambda step: kill_worker(server) if step == 1 else None)
    assert killed.losses == alone[0].losses
    assert killed.tokens == alone[0].tokens
    assert_same_bits(weights(server, killed), weights(server, alone[0]))

    with ThreadPoolExecutor(2) as tenants:
        together = list(tenants.map(lambda tenant: train_and_sample(server.client(), tenant), (0, 1)))
    for run, expected in zip(together, alone, strict=True):
        np.testing.assert_allclose(run.losses, expected.losses, rtol=1e-5)
        assert run.tokens == expected.tokens
        np.testing.assert_allclose(run.logprobs, expected.logprobs, atol=LOGPROB)
