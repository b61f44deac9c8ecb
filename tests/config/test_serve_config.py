"""ServeConfig: defaults that fit a laptop, names that are unique, a worker that gets its part."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from palestra.config import ConfigError, dump_config, load_config
from palestra.config.serve import ModelConfig, ServeConfig, replica_config, worker_config
from palestra.types.engine import WorkerConfig


def test_everything_is_in_one_folder_here_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ServeConfig()
    assert config.state == tmp_path / ".palestra"
    assert config.database == f"sqlite:///{tmp_path}/.palestra/palestra.db"
    assert config.checkpoints == tmp_path / ".palestra" / "checkpoints"
    assert (config.host, config.port, config.require_key) == ("127.0.0.1", 8000, "auto")


def test_folders_follow_the_state_unless_named(tmp_path):
    config = load_config(ServeConfig, [], [f"state={tmp_path}", "checkpoints=~/keep"])
    assert config.database == f"sqlite:///{tmp_path}/palestra.db"
    assert config.checkpoints == Path.home() / "keep"


def test_the_resolved_config_is_the_same_when_loaded_again(tmp_path):
    config = load_config(ServeConfig, [], [f"models=[{{path: {tmp_path}}}]", "limits.max_models=3"])
    file = tmp_path / "config.json"
    file.write_text(dump_config(config))
    assert load_config(ServeConfig, [file]) == config


@pytest.mark.parametrize(
    ("pattern", "told"), [("[0-9", "not a regular expression"), ("x*", "matches empty text"), ("", "empty text")]
)
def test_a_mask_that_cannot_be_meant_is_refused(pattern, told):
    with pytest.raises(ConfigError, match=told):
        load_config(ServeConfig, [], [f'episodes.mask=["{pattern}"]'])


def test_a_worker_is_told_every_setting_there_is(tmp_path):
    model = ModelConfig(path=tmp_path, threads=2, dtype="bfloat16", sample_share=0.25)
    serve = ServeConfig.model_validate({"models": [model], "limits": {"max_models": 7}})
    worker = worker_config(serve, model, "ipc:///s", tmp_path / "w")
    assert (worker.address, worker.model, worker.state) == ("ipc:///s", str(tmp_path), str(tmp_path / "w"))
    assert (worker.threads, worker.dtype, worker.sample_share, worker.max_models) == (2, "bfloat16", 0.25, 7)
    own = {"path", "name", "tool_format", "sampler", "vllm", "gpus", "parallel", "replicas"}  # the server's
    made = {"address", "model", "state", "max_models", "beat_every_s", "devices", "shard", "tensor", "context", "role"}
    elsewhere = {"server_key", "ticket"}  # which `palestra replica` sets
    placed = {
        "is_remote",
        "version",
        "node_folder",
        "base",
        "fingerprint",
        "hub_id",
    }  # which a cluster sets, and for each start:
    started = {"life", "client_key", "meeting"}
    assert set(ModelConfig.model_fields) - own | made | elsewhere | placed | started == set(
        WorkerConfig.__struct_fields__
    )


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        ({}, ()),
        ({"gpus": 1}, ()),
        ({"gpus": 4}, ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ({"gpus": ["cuda:2", "cuda:5"]}, ("cuda:2", "cuda:5")),
        ({"device": "cpu", "parallel": {"data": 2}}, ("cpu", "cpu")),
        ({"device": "cpu", "parallel": {"tensor": 2}}, ("cpu", "cpu")),
        ({"gpus": 4, "parallel": {"tensor": 2}}, ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ({"device": "cpu", "parallel": {"context": 2, "data": 2}}, ("cpu",) * 4),
        ({"device": "cpu", "parallel": {"context": 2, "shard": 2}}, ("cpu",) * 2),
        ({"gpus": 2, "parallel": {"context": 2}, "weights": "nf4", "gradient_shards": 1}, ("cuda:0", "cuda:1")),
    ],
)
def test_ranks_go_to_devices(tmp_path, given, devices):
    model = ModelConfig.model_validate({"path": tmp_path, "gradient_shards": 8, **given})
    assert worker_config(ServeConfig(), model, "a", tmp_path).devices == devices


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"gradient_shards": 6}, "6 is not a power of two; try 4 or 8"),
        ({"gpus": 4}, "4 ranks need 4 gradient shards, and there are 1; set gradient_shards=8"),
        ({"gpus": 3, "gradient_shards": 8}, "3 is not a power of two"),
        ({"gpus": 4, "gradient_shards": 8, "parallel": {"data": 2}}, "make them equal"),
        ({"gradient_shards": 8, "parallel": {"data": 2}}, "set gpus=2 as well, or device=cpu"),
        ({"gpus": 2, "gradient_shards": 8, "parallel": {"shard": 4}}, "only 2 ranks"),
        ({"gpus": 2, "parallel": {"context": 4}}, "parallel.context is 4, but there are only 2 ranks"),
        ({"gpus": 2, "parallel": {"context": 2, "tensor": 2}}, "context × parallel.tensor is 4, but there are only 2"),
        ({"gpus": 2, "parallel": {"context": 2, "data": 2}}, "data × parallel.context is 4, but gpus has 2; make them"),
        ({"parallel": {"context": 2}}, "set gpus=2 as well, or device=cpu"),
        (
            {"gpus": 2, "gradient_shards": 8, "parallel": {"shard": 2}, "weights": "nf4"},
            "nf4 weights cannot be divided",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused(tmp_path, given, told):
    with pytest.raises(ValueError, match=told):
        ModelConfig.model_validate({"path": tmp_path, **given})


def test_replicas_are_a_number_or_settings(tmp_path):
    for given in (2, {"count": 2, "devices": ["cpu", "cpu"]}):
        model = ModelConfig.model_validate({"path": tmp_path, "replicas": given})
        assert model.replicas is not None
        assert model.replicas.count == 2
    serve = ServeConfig.model_validate({"models": [model]})
    assert worker_config(serve, model, "a", tmp_path).cache_tokens == 1  # it never samples
    replica = replica_config(serve, model, 1, "b", tmp_path / "r")
    assert (replica.role, replica.device, replica.cache_tokens) == ("sampler", "cpu", None)
    for wrong, words in (({"count": 2, "devices": ["cpu"]}, "1 entries for 2"), (-1, "greater than or equal to 0")):
        with pytest.raises(ValueError, match=words):
            ModelConfig.model_validate({"path": tmp_path, "replicas": wrong})
    vllm = {"sampler": "vllm", "vllm": {"urls": ["http://one:1"]}}
    with pytest.raises(ValueError, match="replicas are for sampler=torch"):
        ModelConfig.model_validate({"path": tmp_path, "replicas": 1, **vllm})


def test_defaults_agree_with_the_workers_own(tmp_path):
    worker = worker_config(ServeConfig(), ModelConfig(path=tmp_path), "a", tmp_path)
    assert worker == WorkerConfig(address="a", model=str(tmp_path), state=str(tmp_path))


def test_a_model_goes_by_its_folder_or_by_the_names_given(tmp_path):
    assert ModelConfig(path=tmp_path / "tiny").name == ["tiny"]
    assert ModelConfig.model_validate({"path": tmp_path, "name": "Qwen/Qwen3-8B"}).name == ["Qwen/Qwen3-8B"]


def test_two_models_cannot_share_a_name():
    models = "models=[{path: /a/tiny, name: [x, y]}, {path: /b/tiny, name: y}]"
    with pytest.raises(ConfigError, match="two models are served as 'y'"):
        load_config(ServeConfig, [], [models])


@pytest.mark.parametrize(
    "bad",
    ["port=70000", "limits.max_models=0", "models=[{path: /a, name: []}]", "models=[{path: /a, sample_share: 2}]"],
)
def test_impossible_values_are_refused(bad):
    with pytest.raises(ConfigError):
        load_config(ServeConfig, [], [bad])


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("gpu1", False)],
)
def test_which_hosts_are_loopback(host, is_loopback):
    assert ServeConfig(host=host).is_loopback == is_loopback


@pytest.mark.parametrize(
    ("tinkerscript", "is_loopback"),
    [
        ({"enabled": True}, True),
        ({"enabled": True, "host": "0.0.0.0"}, False),
        ({"enabled": False, "host": "0.0.0.0"}, True),
    ],
)
def test_a_second_port_beyond_loopback_needs_keys_at_both(tinkerscript, is_loopback):
    assert ServeConfig.model_validate({"tinkerscript": tinkerscript}).is_loopback == is_loopback


def test_a_negative_time_turns_session_cleaning_off():
    assert ServeConfig().cleans_sessions
    assert not ServeConfig(session_timeout_s=-1).cleans_sessions
    assert not ServeConfig(session_check_s=-1).cleans_sessions


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path / "hf" / "hub"


def add_snapshot(cache: Path, revision: str, *files: str) -> Path:
    folder = cache / "models--Qwen--Qwen3-8B" / "snapshots" / revision
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).touch()
    return folder


def test_a_hub_id_is_found_in_the_cache_and_is_its_name(cache):
    add_snapshot(cache, "old", "config.json", "model.safetensors")
    folder = add_snapshot(cache, "new", "config.json", "model-00001-of-00002.safetensors")
    refs = cache / "models--Qwen--Qwen3-8B" / "refs"
    refs.mkdir()
    (refs / "main").write_text("new\n")
    model = ModelConfig.model_validate({"path": "Qwen/Qwen3-8B"})
    assert (model.path, model.name) == (folder, ["Qwen/Qwen3-8B"])
    assert ModelConfig.model_validate({"path": "Qwen/Qwen3-8B", "name": "q"}).name == ["q"]


def test_a_folder_wins_over_a_hub_id_of_that_name(cache):
    Path("Qwen/Qwen3-8B").mkdir(parents=True)
    model = ModelConfig.model_validate({"path": "Qwen/Qwen3-8B"})
    assert (model.path, model.name) == (Path("Qwen/Qwen3-8B").absolute(), ["Qwen3-8B"])


@pytest.mark.parametrize(("files", "found"), [(None, "not"), (["config.json"], "incomplete")])
def test_a_hub_id_that_is_not_there_says_how_to_get_it(cache, files, found):
    if files is not None:
        add_snapshot(cache, "r", *files)
    with pytest.raises(ConfigError) as caught:
        load_config(ServeConfig, [], ["models=[{path: Qwen/Qwen3-8B}]"])
    assert f"{found} in the cache {cache}; to download it: palestra model pull Qwen/Qwen3-8B" in str(caught.value)


def test_unknown_fields_are_refused(tmp_path):
    with pytest.raises(ValidationError):
        ServeConfig.model_validate({"prot": 1})


def test_vllm_samples_from_unquantised_weights_only(tmp_path):
    vllm = {"path": tmp_path, "sampler": "vllm", "vllm": {"urls": ["http://here:1"]}}
    ModelConfig.model_validate(vllm | {"weights": "bf16"})
    with pytest.raises(ValidationError, match="sampler=vllm samples from the unquantised weights, but weights is int8"):
        ModelConfig.model_validate(vllm | {"weights": "int8"})


@pytest.mark.parametrize(
    "urls",
    [
        {"snapshots": "s3://b", "checkpoints": "s3://b/checkpoints"},
        {"checkpoints": "s3://b/c", "archive": "s3://b/c/"},
        {"snapshots": "s3://b/x/archive/s", "archive": "s3://b/x/archive"},
    ],
)
def test_storage_inside_of_other_storage_is_refused(urls):
    with pytest.raises(ValidationError, match="give each a folder of its own"):
        ServeConfig.model_validate(urls)


def test_storage_beside_other_storage_is_accepted():
    ServeConfig.model_validate({"snapshots": "s3://b/a", "checkpoints": "s3://b/ab", "archive": "s3://b/c"})
