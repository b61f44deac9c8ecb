"""AgentJet's config in our words: what is meant arrives, what means nothing is named, what is dangerous is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from palestra.config.serve import ModelConfig
from palestra.config.train import GrpoConfig
from palestra.server.agentjet.settings import DIRECT, JobConfig
from palestra.server.agentjet.settings_file import MAX_BYTES, AgentJetError, read_keys
from palestra.server.agentjet.trainer_config import make_config, map_for_server, name_run
from palestra.server.agentjet.trainer_files import DUMMIES, TrainerFolder
from palestra.server.agentjet.trainer_records import TrainerRecord
from tests.properties import examples

URL = "http://127.0.0.1:8000"
MODELS = [ModelConfig(path=Path("/models/Qwen3-8B"), name=["Qwen/Qwen3-8B", "student"])]

FULL = """
ajet:
  project_name: ours
  experiment_name: tuesday
  experiment_dir: /etc/somewhere
  backbone: verl
  enable_tinkerscript_mode: True
  model: {path: Qwen/Qwen3-8B}
  data: {train_batch_size: 16, max_prompt_length: 3000}
  rollout:
    user_workflow: os->system
    num_repeat: 4
    temperature: 0.9
    top_p: 0.95
    top_k: 50
    max_response_length_in_one_turn: 512
    max_model_len: 2048
    max_env_worker: 64
    compute_madness_checklist: [nonsense]
  task_reader: {type: random_dummy}
  task_judge: {judge_protocol: null}
  trainer_common:
    save_freq: 7
    test_freq: 20
    total_training_steps: 30
    total_epochs: 50
    mini_batch_num: 2
    algorithm: {adv_estimator: rloo}
    optim: {lr: 2e-5, betas: [0.8, 0.99], weight_decay: 0.01, lr_warmup_steps: -1, lr_scheduler_type: cosine}
    use_kl_loss: True
    kl_loss_coef: 0.002
  lora: {lora_rank: 8}
trinity: {trainer: {max_token_len_per_gpu: 13000}}
"""


def job_of(text: str = "", **ajet: Any) -> JobConfig:
    given = {"model": {"path": "student"}} | ajet
    return map_for_server(text or yaml.safe_dump({"ajet": given}), MODELS)


@pytest.fixture
def folder(tmp_path: Path) -> TrainerFolder:
    return TrainerFolder(tmp_path, "alice")


def config_of(folder: TrainerFolder, text: str = "", **ajet: Any) -> dict[str, Any]:
    return make_config(job_of(text, **ajet), "r", folder, URL)


def test_what_is_meant_arrives(folder: TrainerFolder) -> None:
    config = config_of(folder, FULL)
    assert (config["kind"], config["rollouts"], config["server"]) == ("grpo", "episodes", URL)
    assert config["model"] == config["model"] | {"name": "Qwen/Qwen3-8B", "rank": 8, "tokenizer": "/models/Qwen3-8B"}
    response = {
        "group_size": 4,
        "groups_per_step": 16,
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 50,
        "max_tokens": 512,
    }
    assert config["rollout"] == config["rollout"] | response | {"max_context": 2048}
    assert (config["data"]["max_sequence_length"], config["steps"], config["checkpoint"]["every"]) == (2048, 30, 7)
    optimizer = {"lr": 2e-5, "beta1": 0.8, "beta2": 0.99, "weight_decay": 0.01, "warmup_steps": 0, "schedule": "cosine"}
    assert config["optimizer"] == config["optimizer"] | optimizer
    assert config["algorithm"] == config["algorithm"] | {"advantage": "leave_one_out", "minibatches": 2}
    assert (config["penalty"]["kl"], config["eval"]["every"]) == (0.002, 0)
    assert (config["episodes"]["run"], config["episodes"]["players"], config["alias"]) == ("r", 0, "r")


def test_what_means_nothing_here_is_named() -> None:
    job = job_of(FULL)
    assert {"ajet.backbone", "ajet.rollout.user_workflow", "ajet.rollout.compute_madness_checklist"} <= set(job.unknown)
    assert {"ajet.trainer_common.test_freq", "trinity.trainer.max_token_len_per_gpu"} <= set(job.unknown)
    keys = set(read_keys(FULL))
    used = {"rollout.num_repeat", "model.path", "experiment_name", "trainer_common.optim.betas", "lora.lora_rank"}
    assert keys - set(job.unknown) >= {f"ajet.{key}" for key in used}
    assert job_of(rollout={"num_repaet": 4}).unknown == ["ajet.rollout.num_repaet"]


def test_no_path_of_the_config_is_used(folder: TrainerFolder, tmp_path: Path) -> None:
    job = job_of(FULL)
    assert job.run == "tuesday"
    assert job_of(experiment_name="read_yaml_name", experiment_dir="/etc/../x y").run == "x-y"
    assert job_of(experiment_dir="auto").run is None
    config = make_config(job, "tuesday", folder, URL)
    assert "/etc" not in json.dumps(config)
    paths = [config["runs"], config["environments"][0]["tasks"]]
    assert all(Path(path).is_relative_to(tmp_path) for path in paths)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("student", True),
        ("/models/Qwen3-8B", True),
        ("/elsewhere/Qwen3-8B/", True),
        ("Qwen3-8B", True),
        ("Qwen3", False),
    ],
)
def test_the_model_must_be_served_here(asked: str, found: bool) -> None:
    if found:
        assert job_of(model={"path": asked}).mapped["model.name"] == "Qwen/Qwen3-8B"
    else:
        with pytest.raises(AgentJetError, match=r"ajet\.model\.path: 'Qwen3' is not served.*Qwen/Qwen3-8B, student"):
            job_of(model={"path": asked})


@pytest.mark.parametrize(
    ("ajet", "message"),
    [
        ({"model": {}}, "ajet.model.path is missing"),
        ({"rollout": {"num_repeat": "many"}}, r"rollout\.group_size .*'many' \(ajet\.rollout\.num_repeat\)"),
        ({"rollout": {"num_repeat": 1}}, "a group of one has no baseline"),
        ({"rollout": {"temperature": [1, 2]}}, r"ajet\.rollout\.temperature: a single value is needed"),
        ({"rollout": {"temperature": float("nan")}}, r"ajet\.rollout\.temperature: nan"),
        ({"trainer_common": {"algorithm": {"adv_estimator": "gae"}}}, "'gae' is not supported; use grpo or rloo"),
        ({"trainer_common": {"total_epochs": 0}}, "1 or more"),
        ({"trainer_common": {"use_kl_loss": "yes"}}, "true or false"),
        ({"trainer_common": {"optim": {"betas": [1]}}}, "a list of 2 numbers"),
        ({"task_reader": {"type": "huggingface_dat_repo"}}, "is not supported; use random_dummy"),
        ({"task_reader": {"type": "jsonl_dataset_file"}}, "file_path is missing"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(folder: TrainerFolder, ajet: dict[str, Any], message: str) -> None:
    with pytest.raises(AgentJetError, match=message):
        config_of(folder, **ajet)


def nested(depth: int) -> str:
    return "ajet:\n" + "".join(f"{' ' * at}a:\n" for at in range(1, depth)) + " " * depth + "b: 1"


DOUBLING = "ajet:\n  a0: &a0 {x: 1}\n" + "".join(
    f"  a{n}: &a{n} {{l: *a{n - 1}, r: *a{n - 1}}}\n" for n in range(1, 40)
)


LONG = "0x" + "f" * 6000
"""Python does not write such numbers out."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no section 'ajet'"),
        ("ajet: 3", "no section 'ajet'"),
        ("- ajet", "no section 'ajet'"),
        ("ajet: {a: 1, a: 2}", "'a' is written twice"),
        ("ajet: [", "not valid YAML"),
        ("ajet: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("ajet: &a {b: *a}", "deeper than"),
        ("x: &x {y: 1}\najet: {<<: *x}", "merge keys"),
        (nested(40), "deeper than"),
        (DOUBLING, "more than 2000 keys|deeper than"),
        ("ajet: {" + ", ".join(f"k{n}: 1" for n in range(3000)) + "}", "more than 2000 keys"),
        ("ajet: {" + "k" * 300 + ": 1}", "longer than 200 characters"),
        ("ajet: {a: '" + "x" * MAX_BYTES + "'}", "longer than"),
        ("ajet: {a: \x00}", "not valid YAML"),
        (f"ajet: {{model: {{path: student}}, rollout: {{num_repeat: {LONG}}}}}", "longer than 64 bits"),
        (f"ajet: {{model: {{path: student}}, trainer_common: {{optim: {{betas: [{LONG}, 1]}}}}}}", "than 64 bits"),
        (f"ajet:\n  ? {LONG}\n  : 1", "longer than 64 bits"),
    ],
)
def test_hostile_yaml_is_refused_in_words(text: str, message: str) -> None:
    with pytest.raises(AgentJetError, match=message):
        map_for_server(text, MODELS)


VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.lists(st.floats(), max_size=2)),
    st.sampled_from([0, -1, 2**70, 1e300, "grpo", "cosine", "random_dummy", "student", "../x", "0x10", {"a": {}}]),
)
KEYS = [*DIRECT, *(key.removeprefix("ajet.") for key in read_keys(FULL))]
ESCAPES = st.text("ajet: {}[]\n\"'&*!|>-\\\\ud80x0<", max_size=30)


@given(given_keys=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
@examples(60)
def test_whatever_the_values_it_is_a_config_or_a_refusal(given_keys: dict[str, Any]) -> None:
    tree: dict[str, Any] = {"model": {"path": "student"}}
    for key, value in given_keys.items():
        *parents, last = key.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    with TemporaryDirectory() as folder, suppress(AgentJetError):
        config = config_of(TrainerFolder(Path(folder), "alice"), **tree)
        assert GrpoConfig.model_validate(msgspec.json.decode(msgspec.json.encode(config))).rollouts == "episodes"


@given(
    text=ESCAPES
    | st.text(max_size=30)
    | st.builds(lambda inner: f"ajet: {{model: {{path: student}}, {inner}}}", ESCAPES)
)
@examples(300)
def test_whatever_the_text_it_is_a_config_or_a_refusal(text: str) -> None:
    assert msgspec.json.encode(_told(text))


def _told(text: str) -> Any:
    try:
        job = map_for_server(text, MODELS)
    except AgentJetError as refusal:
        return str(refusal)
    return [job.mapped, job.unknown, job.notes]


# Tasks


def test_dummies_are_numbered_from_zero(folder: TrainerFolder) -> None:
    config = config_of(folder, data={"train_batch_size": 10}, trainer_common={"total_epochs": 3})
    rows = [json.loads(line) for line in Path(config["environments"][0]["tasks"]).read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(DUMMIES))
    assert config["steps"] == 3 * DUMMIES // 10


def test_task_files_come_from_the_servers_own_folder(folder: TrainerFolder, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    theirs = {"main_query": "2+2?", "init_messages": [{"role": "system", "content": "Add."}], "task_id": "t7"}
    (tasks / "train.jsonl").write_text(json.dumps(theirs | {"metadata": {"answer": 4}}) + "\n")
    (tasks / "dev.jsonl").write_text('{"prompt": "1+1?"}\n')
    files = {"training": {"file_path": "train.jsonl"}, "validation": {"file_path": "dev.jsonl"}}
    reader = {"type": "jsonl_dataset_file", "jsonl_dataset_file": files}
    config = config_of(folder, task_reader=reader, trainer_common={"test_freq": 3, "val_pass_n": 2})
    entry = config["environments"][0]
    (row,) = (json.loads(line) for line in Path(entry["tasks"]).read_text().splitlines())
    assert (row["id"], row["metadata"]) == ("t7", {"answer": 4})
    assert [message["content"] for message in row["prompt"]] == ["Add.", "2+2?"]
    assert Path(entry["eval_tasks"]).read_text() == '{"prompt":"1+1?"}\n'
    assert (config["eval"]["every"], config["eval"]["samples"]) == (3, 2)


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret.jsonl", "link.jsonl", "none.jsonl", "a\x00b", "x" * 5000])
def test_no_other_file_is_read(folder: TrainerFolder, tmp_path: Path, path: str) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "secret.jsonl").write_text('{"prompt": "secret"}\n')
    (tmp_path / "tasks" / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    reader = {"type": "jsonl_dataset_file", "jsonl_dataset_file": {"training": {"file_path": path}}}
    with pytest.raises(AgentJetError, match="no task file") as refusal:
        config_of(folder, task_reader=reader)
    assert "secret" not in str(refusal.value).replace("secret.jsonl", "")


def test_a_task_file_with_a_mistake_says_in_which_line(folder: TrainerFolder, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    reader = {"type": "jsonl_dataset_file", "jsonl_dataset_file": {"training": {"file_path": "t.jsonl"}}}
    for text, message in (
        ('{"prompt": "a"}\n{"query": 1}\n', "line 2: no 'prompt'"),
        ("[1]\n", "line 1: not a JSON object"),
    ):
        (tmp_path / "tasks" / "t.jsonl").write_text(text)
        with pytest.raises(AgentJetError, match=message):
            config_of(folder, task_reader=reader)


# Names of runs


def test_a_named_run_is_gone_on_with_until_it_is_done(folder: TrainerFolder) -> None:
    assert name_run("x", TrainerRecord(), folder, {"others"}) == "x"
    assert name_run("x", TrainerRecord(), folder, {"x"}) == "x-2"  # of a trainer that is not ours
    (folder.runs / "x").mkdir(parents=True)
    (folder.runs / "x" / "config.json").write_text("{}")
    assert name_run("x", TrainerRecord(), folder, {"x"}) == "x"
    assert name_run("x", TrainerRecord(done=["x"]), folder, {"x"}) == "x-2"


def test_a_run_without_a_name_is_always_a_new_one(folder: TrainerFolder) -> None:
    first = name_run(None, TrainerRecord(), folder, set())
    (folder.runs / first).mkdir(parents=True)
    (folder.runs / first / "config.json").write_text("{}")
    assert name_run(None, TrainerRecord(), folder, set()) != first
