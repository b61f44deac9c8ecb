"""`palestra serve --dry-run`: placement and memory before anything starts, and a plan that fits where one does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.test_cli import palestra
from tests.memory_plan.test_model_plan import write_hollow

VLLM = ("models.0.sampler=vllm", "models.0.vllm.urls=[http://127.0.0.1:8001]")


@pytest.fixture(scope="module")
def eight_billion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hollow(tmp_path_factory.mktemp("models") / "8b", "qwen3-8b")


def advice(output: str) -> list[str]:
    return found_in(r"it fits with: (.*)", output).split()


def found_in(pattern: str, output: str) -> str:
    found = re.search(pattern, output)
    assert found is not None, output
    return found.group(1)


def test_ranks_are_placed_and_a_divided_base_model_is_half_of_it(eight_billion):
    common = (
        "serve",
        "--model",
        eight_billion,
        "--dry-run",
        "--memory",
        "80GB",
        "models.0.gpus=2",
        "models.0.gradient_shards=8",
        "models.0.checkpointing=true",
    )
    whole = palestra(*common)
    assert whole.exit_code == 0, whole.output
    assert [line.split()[0] for line in whole.stdout.splitlines() if line.startswith("cuda")] == ["cuda:0", "cuda:1"]
    assert whole.stdout.count("weights ") == 2
    assert whole.stdout.count("KV cache") == 1  # rank 0 samples
    divided = palestra(*common, "models.0.parallel.shard=2")
    sizes = [float(found_in(r"weights +([\d.]+) GiB", shown.stdout)) for shown in (whole, divided)]
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.2)  # embeddings are whole
    assert "gathered layers" in divided.stdout


@pytest.mark.parametrize(
    ("memory", "settings", "expected"),
    [
        ("40GB", (), "models.0.checkpointing=True"),
        ("30GB", (), "models.0.checkpointing=offload"),
        ("26GB", ("models.0.checkpointing=offload",), "models.0.micro_batch_tokens="),
        ("16GB", ("models.0.gpus=4", "models.0.gradient_shards=8"), "models.0.parallel.tensor="),
        ("16GB", ("models.0.gpus=4", "models.0.gradient_shards=8", *VLLM), "models.0.parallel.shard="),
        ("14GB", ("models.0.device=cuda",), "models.0.weights=nf4"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_plan_that_does(eight_billion, memory, settings, expected):
    common = ("serve", "--model", eight_billion, "--dry-run", "--memory", memory, "models.0.device=cuda", *settings)
    refused = palestra(*common)
    assert refused.exit_code == 1
    assert "does not fit into" in refused.stdout
    found = advice(refused.stderr)
    assert any(setting.startswith(expected) for setting in found), found
    assert palestra(*common, *found).exit_code == 0


def test_a_plan_says_what_checkpointing_and_offloading_cost(eight_billion):
    common = ("serve", "--model", eight_billion, "--dry-run", "--memory", "140GB", "models.0.device=cuda")
    plain, recomputed, offloaded = (
        palestra(*common, "models.0.micro_batch_tokens=32768", f"models.0.checkpointing={value}").stdout
        for value in ("false", "true", "offload")
    )
    assert "again" not in plain
    assert "(checkpointing), at about 0.7 of the speed" in recomputed
    assert "main memory" not in recomputed
    assert "checkpointing=offload" in offloaded
    assert float(found_in(r"in main memory +([\d.]+) GiB", offloaded)) == 36 * 32768 * 4096 * 2 / 2**30


def test_nothing_is_offloaded_beside_a_cpu(eight_billion):
    common = ("serve", "--model", eight_billion, "--dry-run", "models.0.device=cpu", "models.0.micro_batch_tokens=4096")
    recomputed, offloaded = (
        palestra(*common, "--memory", "80GB", f"models.0.checkpointing={value}").stdout for value in ("true", "offload")
    )
    assert recomputed == offloaded
    for setting in advice(palestra(*common, "--memory", "19GB").stderr):
        assert "offload" not in setting


def test_ranks_that_share_every_layer_share_weights_and_cache(eight_billion):
    common = ("serve", "--model", eight_billion, "--dry-run", "--memory", "80GB", "models.0.checkpointing=true")
    settings = ("models.0.cache_tokens=65536", "models.0.gradient_shards=8")
    alone = palestra(*common, *settings, "models.0.gpus=1")
    shared = palestra(*common, *settings, "models.0.gpus=4", "models.0.parallel.tensor=2")
    assert shared.exit_code == 0, shared.output
    sizes = [float(found_in(r"weights +([\d.]+) GiB", shown.stdout)) for shown in (alone, shared)]
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.2)  # embeddings are whole
    caches = [float(found_in(r"KV cache +([\d.]+) GiB", shown.stdout)) for shown in (alone, shared)]
    assert caches[1] == pytest.approx(caches[0] / 2, rel=0.02)
    assert shared.stdout.count("KV cache") == 2  # of four: those that sample together
    assert shared.stdout.count("sums over ranks") == 4


def test_ranks_that_share_every_micro_batch_train_a_part_of_its_rows_each(eight_billion):
    common = ("serve", "--model", eight_billion, "--dry-run", "--memory", "80GB", "models.0.checkpointing=true")
    settings = ("models.0.micro_batch_tokens=16384", "models.0.gpus=4", "models.0.gradient_shards=8")
    data, context = palestra(*common, *settings), palestra(*common, *settings, "models.0.parallel.context=4")
    assert context.exit_code == 0, context.output
    assert "training 16384 tokens of 65536" in context.stdout
    assert context.stdout.count("exchanges of rows") == 4
    for part in ("weights", "training 16384 tokens"):
        whole, own = (found_in(rf"{part}.* ([\d.]+) GiB", shown.stdout) for shown in (data, context))
        assert own == whole


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("models.0.gpus=64", "models.0.parallel.context=64"), "it has 32 heads of queries and 8 of keys and values"),
        (("models.0.gpus=16", "models.0.parallel.tensor=16"), "it has 8 heads of keys and values"),
        (("models.0.gpus=4", "models.0.parallel.tensor=2", "models.0.parallel.shard=2"), "cannot be combined"),
        (("models.0.gpus=4", "models.0.parallel.tensor=8"), "only 4 ranks"),
        (("models.0.gpus=4", "models.0.parallel.tensor=2", "models.0.parallel.data=4"), "is 8, but gpus has 4"),
        (("models.0.device=cuda", "models.0.parallel.tensor=2"), "set gpus=2"),
        (("models.0.gpus=2", "models.0.parallel.tensor=2", "models.0.weights=int8"), "int8 weights cannot be divided"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_a_sentence(eight_billion, settings, said):
    refused = palestra("serve", "--model", eight_billion, "--dry-run", "--memory", "80GB", *settings)
    assert refused.exit_code != 0
    assert said in refused.stderr


def test_a_device_that_is_not_here_needs_its_memory_told(eight_billion):
    refused = palestra("serve", "--model", eight_billion, "--dry-run", "models.0.gpus=[cuda:63]")
    assert refused.exit_code == 2
    assert "--memory" in refused.stderr


def test_what_nothing_helps_says_so(eight_billion):
    refused = palestra("serve", "--model", eight_billion, "--dry-run", "--memory", "1GB", "models.0.device=cuda")
    assert refused.exit_code == 1
    assert "choose a smaller model" in refused.stderr
