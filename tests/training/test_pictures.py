"""Runs whose environments show pictures: what was sampled is what is trained, and records keep the files."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.config.train import load_train_config
from palestra.data.errors import DatasetError
from palestra.endpoints.model_folders import SetupError
from palestra.environments import image_part
from palestra.episodes import Episode, EpisodeClient, play
from palestra.rollouts.policy_sampler import PolicyError
from palestra.rollouts.sources import RolloutSourceError
from palestra.runs.listener import Silence
from palestra.runs.pictures import read_picture
from palestra.runs.reader import Part, RunStatus
from palestra.runs.writer import RunFolder
from palestra.training.launch import check, train
from palestra.types.pictures import short_name
from tests.pictures import damaged, drawn, file_of, pixels_of
from tests.server.conftest import Server
from tests.training import shown
from tests.training.trainers import FEW

TEXT = {"type": "text", "text": "What is it?"}
ROWS = 12
"""Positions of a picture of 64 x 48 pixels; one of 32 x 32 has 4."""
SEEING = {
    "environments": [{"name": shown.NAME}],
    "rollout": {**FEW, "max_tokens": 6, "max_context": 200},
    "eval": {"every": 2, "tasks": 2},
    "penalty": {"kl": 0.01},
    "algorithm": {"observation_loss": 0.1},
    "steps": 2,
}


@pytest.fixture(scope="module")
def seeing(random_model, tmp_path_factory) -> Path:
    """A random model that ends its turns soon: a part of all tokens end one."""
    folder = tmp_path_factory.mktemp("seeing") / "model"
    shutil.copytree(random_model("qwen3_vl"), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(150, 400))}))
    return folder


@pytest.fixture(scope="module")
def server(seeing, tmp_path_factory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server"), seeing) as started:
        yield started.start()


@pytest.fixture
def settings(server, seeing) -> dict[str, Any]:
    """Of runs at the server."""
    return {"server": server.url, "model": {"name": server.name, "tokenizer": str(seeing)}}


def test_a_run_learns_from_rollouts_with_pictures(run_training, settings):
    run = run_training("sees", **settings, **SEEING)
    assert run.status() is RunStatus.DONE
    steps = [row for row in run.read_metrics() if "mismatch/logprob_abs_max" in row]
    assert [row["rollouts/failed"] for row in steps] == [0.0, 0.0]
    assert max(row["mismatch/logprob_abs_max"] for row in steps) < 2e-4
    record = next(one for one in run.read_rollouts(1, Part.ROLLOUTS) if one["turns"] == 2)
    first, _, second, _, _ = record["messages"]
    (_, part, _), (other,) = first["content"], second["content"]
    number = int(record["task"])
    assert read_picture(run.path, digest_of(part)) == file_of(drawn(number))
    assert read_picture(run.path, digest_of(other)) == file_of(drawn(1000 + number, 32, 32), "JPEG")
    row = next(one for one in run.read_rollouts(1, Part.TOKENS) if one["id"] == record["id"])
    assert [(rows, digest) for _, rows, digest in row["pictures"]] == [(ROWS, digest_of(part)), (4, digest_of(other))]


def test_a_teacher_reads_the_pictures_that_the_student_saw(run_training, settings):
    """The base model agrees with a student that is new, and not with one that was told more."""
    distilled = {**SEEING, "kind": "distill", "penalty": {}, "algorithm": {}, "steps": 1, "eval": {"every": 0}}
    base = {"model": settings["model"]["name"], "tokenizer": settings["model"]["tokenizer"]}
    teachers = {"plain": base, "told": {"model": "self", "context": "Picture {n}."}}
    plain, told = (
        run_training(name, **settings, **distilled, teachers=[teacher]).read_metrics()[0]
        for name, teacher in teachers.items()
    )
    assert plain["kl/teacher"] == pytest.approx(0.0, abs=1e-4)
    assert abs(told["kl/teacher"]) > 1e-3


def test_a_run_learns_from_episodes_that_others_play_with_pictures(run_training, settings):
    """The player sends a picture, and then another one, with the official client of OpenAI."""
    stop = threading.Event()

    def look(episode: Episode) -> float:
        number, client = episode.task.extras["n"], episode.openai()
        asked: list[Any] = [{"role": "user", "content": [image_part(drawn(number)), TEXT]}]
        first = client.chat.completions.create(model="policy", messages=asked, max_tokens=6).choices[0].message
        asked += [{"role": "assistant", "content": first.content}]
        asked += [{"role": "user", "content": [image_part(drawn(1000 + number, 32, 32))]}]
        answer = client.chat.completions.create(model="policy", messages=asked, max_tokens=6).choices[0].message
        return float(len(answer.content or "") % 3)

    def work() -> None:
        with EpisodeClient(settings["server"], "tml-local") as client:
            while not stop.is_set():
                client.run("played")
                play(client, look, run="played", concurrency=4, idle_s=0.2, claim_s=0.2, handle_signals=False)

    players = threading.Thread(target=work)
    players.start()
    try:
        episodes = {"players": 0, "run": "played"}
        plain = {**SEEING, "steps": 1, "eval": {"every": 0}, "rollouts": "episodes", "episodes": episodes}
        run = run_training("played", **settings, **plain)
    finally:
        stop.set()
        players.join()
    assert run.status() is RunStatus.DONE
    (step,) = run.read_metrics()
    assert step["rollouts/failed"] == 0.0
    assert step["mismatch/logprob_abs_max"] < 2e-4
    record = next(one for one in run.read_rollouts(1, Part.ROLLOUTS) if one["turns"] == 2)
    parts = [part for one in record["messages"] if one["role"] == "user" for part in one["content"]]
    found = [read_picture(run.path, digest_of(part)) for part in parts if part["type"] == "image_url"]
    number = int(record["task"])
    pictures = [drawn(number), drawn(1000 + number, 32, 32)]
    assert [pixels_of(file or b"") for file in found] == [one.tobytes() for one in pictures]
    row = next(one for one in run.read_rollouts(1, Part.TOKENS) if one["id"] == record["id"])
    assert [rows for _, rows, _ in row["pictures"]] == [ROWS, 4]


@pytest.mark.slow
def test_a_run_plays_episodes_with_pictures_itself(run_training, settings):
    run = run_training("own", **settings, **{**SEEING, "steps": 1, "rollouts": "episodes", "episodes": {"players": 4}})
    (step,) = [row for row in run.read_metrics() if "mismatch/logprob_abs_max" in row]
    assert (step["rollouts/failed"], step["mismatch/logprob_abs_max"] < 2e-4) == (0.0, True)
    for record in run.read_rollouts(1, Part.ROLLOUTS):
        shown = [digest_of(part) for part in record["messages"][0]["content"] if part["type"] == "image_url"]
        assert [pixels_of(read_picture(run.path, one) or b"") for one in shown] == [
            drawn(int(record["task"])).tobytes()
        ]


def digest_of(part):
    return part["image_url"]["url"].removeprefix("picture:")


def test_a_model_that_reads_text_only_ends_the_run_at_the_first_picture(run_training):
    with pytest.raises(RolloutSourceError, match=r"shown:ShownEnv: a message has a picture, but this model reads text"):
        run_training("blind", **SEEING)


ANSWERS = ("It is a cat.", "It is a dog.")


@pytest.fixture
def pictures(tmp_path) -> Path:
    """Rows that differ in their pictures only."""
    for n in range(2):
        (tmp_path / f"{n}.png").write_bytes(file_of(drawn(n)))
    return tmp_path


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


FAST = {
    "optimizer": {"lr": 1e-2, "warmup_steps": 0, "schedule": "constant"},
    "batch_size": 2,
    "checkpoint": {"every": 100},
    "max_sequence_length": 64,
}


def test_sft_learns_to_tell_pictures_apart(settings, pictures):
    data = written(
        pictures, [{"prompt": "<image>What is it?", "completion": ANSWERS[n], "images": [f"{n}.png"]} for n in range(2)]
    )
    config = load_train_config(
        [], [], {"kind": "sft", "data": data, "eval_data": data, "steps": 40, **FAST, **settings}
    )
    with RunFolder.create(pictures / "runs", "sft", config) as folder:
        asyncio.run(train(config, folder, Silence()))
    blind = math.log(2) / 6  # the last word of the answer, guessed, and the rest of it known
    *_, last = (row["eval/loss"] for row in folder.read_metrics() if "eval/loss" in row)
    assert last < blind / 3


def test_dpo_prefers_by_the_picture(settings, pictures):
    rows = [
        {"prompt": "<image>?", "chosen": ANSWERS[n], "rejected": ANSWERS[1 - n], "image": f"{n}.png"} for n in range(2)
    ]
    config = load_train_config(
        [], [], {"kind": "dpo", "data": written(pictures, rows), "steps": 16, **FAST, **settings}
    )
    with RunFolder.create(pictures / "runs", "dpo", config) as folder:
        asyncio.run(train(config, folder, Silence()))
    steps = folder.read_metrics()
    assert steps[0]["loss/mean"] == pytest.approx(math.log(2), abs=1e-3)
    assert steps[-1]["dpo/accuracy"] == 1.0
    assert steps[-1]["loss/mean"] < 0.3


def test_a_damaged_picture_ends_a_run_on_a_file_with_its_row(settings, pictures):
    (pictures / "1.png").write_bytes(damaged())
    data = written(
        pictures, [{"prompt": "<image>What is it?", "completion": ANSWERS[n], "images": [f"{n}.png"]} for n in range(2)]
    )
    config = load_train_config([], [], {"kind": "sft", "data": data, "steps": 2, **FAST, **settings})
    named = rf"line 2: messages\[0\].content\[0\]: the picture .*1\.png: .*SHA-256 {hash_of(damaged())}.*damaged or cut"
    with (
        RunFolder.create(pictures / "runs", "sft", config) as folder,
        pytest.raises(PolicyError, match=named),
    ):
        asyncio.run(train(config, folder, Silence()))


def test_a_damaged_picture_of_a_task_fails_its_rollouts_only(run_training, settings, pictures):
    (pictures / "1.png").write_bytes(damaged())
    tasks = written(pictures, [{"prompt": "<image>What is it?", "images": [f"{n}.png"]} for n in range(2)])
    environments = [{"name": shown.GIVEN, "tasks": tasks}]
    run = run_training("given", **settings, **SEEING | {"environments": environments, "eval": {"every": 0}, "steps": 1})
    assert run.status() is RunStatus.DONE
    records = list(run.read_rollouts(1, Part.ROLLOUTS))
    failed = [one for one in records if one["stop"] == "sampling_failed"]
    assert len(failed) == len(records) / 2
    for one in failed:
        assert "line 2: messages[0].content[0]: the picture" in one["error"]
        assert hash_of(damaged()) in one["error"]


def hash_of(file: bytes) -> str:
    return short_name(hashlib.sha256(file).hexdigest())


def test_a_model_that_reads_text_only_is_refused_before_the_run(pictures, ephebe_url):
    rows = [{"prompt": "?", "completion": "A cat."}] * 40
    data = written(pictures, [*rows, {"prompt": "<image>?", "completion": "A cat.", "images": ["0.png"]}])
    config = load_train_config([], [], {"kind": "sft", "data": data, "server": ephebe_url, "steps": 1})
    with pytest.raises(DatasetError, match=r"data.jsonl, line 41: a message has a picture, but this model reads text"):
        check(config)
    tasks = {"name": shown.NAME, "tasks": written(pictures, [{"prompt": "<image>?", "images": ["0.png"]}])}
    config = load_train_config(
        [], [], {"environments": [tasks], "server": ephebe_url, "steps": 1, "eval": {"every": 0}}
    )
    with pytest.raises(SetupError, match="shown:ShownEnv: a message has a picture, but this model reads text only"):
        check(config)
