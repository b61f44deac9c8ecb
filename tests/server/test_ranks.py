"""Groups of ranks behind a real server: any rank may die, hang or run out of memory, and the client notices a pause."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import tinker
from tinker import types

from tests.server.test_faults import Run, assert_same_bits, weights
from tests.server.test_poison import POISON

pytestmark = pytest.mark.distributed

MakeServer = Callable[..., Any]
STEPS, KILLS = 60, 20
RANKS = ("models.0.gradient_shards=8", "models.0.threads=1", "models.0.micro_batch_tokens=64")


def batch(step: int, n: int = 24) -> list[types.Datum]:
    rng = np.random.default_rng(step)
    data = []
    for length in rng.integers(5, 60, n):
        tokens = rng.integers(5, 300, length + 1).tolist()
        inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * int(length)}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def train(client: tinker.ServiceClient, steps: int, on_step: Callable[[int], None] = lambda step: None) -> Run:
    model = client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=7)
    run = Run()
    for step in range(steps):
        passed = model.forward_backward(batch(step, 3 + step % 22), "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))
        on_step(step)
        run.losses.append(passed.result(timeout=200).metrics["loss:sum"])
        stepped.result(timeout=200)
    run.path = model.save_state("end").result(timeout=100).path
    return run


def ranks_of(server: Any) -> list[psutil.Process]:
    first = psutil.Process(server.worker_pid)
    return [first, *first.children()]


def train_while_ranks_die(server: Any, steps: int, kills: int) -> Run:
    """Any rank is killed while it computes, before so many of the steps."""
    rng, killed = random.Random(0), [0]
    moments = set(rng.sample(range(steps), kills))

    def disturb(step: int) -> None:
        if step in moments:
            killed.append(server.wait_worker(other_than=killed[-1]))  # the last kill may not have been noticed yet
            time.sleep(rng.uniform(0.0, 0.15))
            rng.choice(ranks_of(server)).kill()

    return train(server.client(), steps, disturb)


def test_ranks_killed_at_any_moment_end_at_the_bits_of_one_process(make_server: MakeServer) -> None:
    alone = make_server(*RANKS)
    expected = train(alone.client(), STEPS)
    bits = weights(alone, expected)
    assert alone.stop() == 0
    server = make_server(*RANKS, "models.0.parallel.data=2", "models.0.snapshot_every_s=0.5")
    run = train_while_ranks_die(server, STEPS, KILLS)
    assert run.losses == expected.losses
    assert_same_bits(weights(server, run), bits)
    assert f'reason="died"}} {KILLS}.0' in server.metrics()
    sampler = server.client().create_sampling_client(run.path)
    answer = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 2, types.SamplingParams(max_tokens=5))
    assert len(answer.result(timeout=100).sequences) == 2
    assert server.stop() == 0


def test_followers_end_when_rank_0_dies(make_server: MakeServer) -> None:
    server = make_server(*RANKS, "models.0.parallel.data=4")
    first, *followers = ranks_of(server)
    assert len(followers) == 3
    first.kill()
    server.until(lambda: not any(process.is_running() for process in followers))
    server.wait_worker(other_than=first.pid)


def test_a_run_goes_on_with_another_number_of_ranks_at_the_same_bits(make_server: MakeServer) -> None:
    alone = make_server(*RANKS)
    expected = train(alone.client(), 9)
    server = make_server(*RANKS)
    sizes = {3: 4, 6: 2}

    def resize(step: int) -> None:
        if step in sizes:
            server.overrides.append(f"models.0.parallel.data={sizes[step]}")
            server.restart()
            server.until(lambda: len(ranks_of(server)) == sizes[step])

    run = train(server.client(), 9, resize)
    assert run.losses == expected.losses
    assert_same_bits(weights(server, run), weights(alone, expected))


FAILURES = {
    "hangs": "time.sleep(3600)",
    "runs out of memory": "raise torch.OutOfMemoryError('CUDA out of memory')",
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_request_that_one_rank_does_not_survive_is_given_up_and_everybody_goes_on(
    make_server: MakeServer, how: str
) -> None:
    server = make_server(
        *RANKS, "models.0.parallel.data=2", "models.0.snapshot_every_s=100000", worker_stall_s=4, start=False
    )
    server.sabotage(f"""
        if "PALESTRA_FOLLOWER" in os.environ:
            import time, torch
            from palestra.engine.torch_trainer import TorchTrainer
            forward = TorchTrainer.forward

            def forward_or_fail(self, parts, *, train):
                if any({POISON} in datum.tokens for part in parts for datum in part.data):
                    {FAILURES[how]}
                return forward(self, parts, train=train)

            TorchTrainer.forward = forward_or_fail
    """)
    server.start()
    client = server.client()
    model = client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=3)
    other = client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=5)
    deadly = []
    for n in range(4):  # nothing is shared, so that each rank gets some of them
        tokens = [5 + n, *[POISON] * 39]
        inputs: Any = {"target_tokens": tokens, "weights": [1.0] * 40}
        deadly.append(types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs))
    before = model.forward_backward(batch(0), "cross_entropy")
    odd = model.forward_backward(deadly, "cross_entropy")
    after = model.optim_step(types.AdamParams(learning_rate=1e-3))
    others = [other.forward_backward(batch(i), "cross_entropy") for i in range(3)]
    with pytest.raises(tinker.RequestFailedError, match=r"given up"):
        odd.result(timeout=250)
    assert before.result(timeout=100).metrics["loss:sum"] > 0
    assert after.result(timeout=100).metrics["grad_norm"] > 0
    assert all(future.result(timeout=100).metrics for future in others)
    assert server.stop() == 0


def test_a_follower_that_cannot_start_says_why(make_server: MakeServer) -> None:
    server = make_server(*RANKS, "models.0.parallel.data=2", start=False)
    server.sabotage("""
        if "PALESTRA_FOLLOWER" in os.environ:
            from palestra.engine.torch_trainer import TorchTrainer

            def fail(self, *args):
                raise RuntimeError("this card is broken")

            TorchTrainer.__init__ = fail
    """)
    server.launch()
    server.until(lambda: server.process.poll() is not None, timeout_s=100)
    assert "rank 1: this card is broken" in server.said()
