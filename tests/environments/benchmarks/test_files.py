"""Files of benchmarks are read as they are published, wherever they are, and a missing one is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from palestra.environments import TaskFileError
from palestra.environments.benchmarks.catalogue import BENCHMARKS
from palestra.environments.benchmarks.gsm8k import Gsm8k
from palestra.environments.benchmarks.mathematics import Aime, Math500
from palestra.environments.benchmarks.programs import HumanEval, Mbpp
from tests.environments.benchmarks import rows
from tests.environments.benchmarks.rows import tasks_of, write_rows


def hub_snapshot(hub: Path, hub_id: str) -> Path:
    """A dataset's folder as `huggingface_hub` leaves it: a revision that `main` points at."""
    repo = hub / f"datasets--{hub_id.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc123")
    folder = repo / "snapshots" / "abc123"
    folder.mkdir(parents=True)
    return folder


def test_files_are_found_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    import pyarrow
    from pyarrow import parquet

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    main = hub_snapshot(tmp_path, "openai/gsm8k") / "main"
    main.mkdir()
    for split in ("train", "test"):
        parquet.write_table(pyarrow.Table.from_pylist(rows.GSM8K), main / f"{split}-00000-of-00001.parquet")
    asked = Gsm8k.tasks("eval")
    assert [task["id"] for task in asked] == ["gsm8k-0", "gsm8k-1", "gsm8k-2"]
    assert asked[0]["prompt"][0]["content"].startswith(rows.GSM8K[0]["question"])
    assert [task["id"] for task in Gsm8k.tasks("train")] == ["gsm8k-train-0", "gsm8k-train-1", "gsm8k-train-2"]
    (main / "train-00000-of-00001.parquet").unlink()
    with pytest.raises(TaskFileError, match=r"its training file .* must be beside"):
        Gsm8k.tasks("train")
    write_rows(hub_snapshot(tmp_path, "HuggingFaceH4/MATH-500") / "test.jsonl", rows.MATH500)
    first = Math500.tasks("eval")[0]
    assert (first["id"], first["answer"], first["level"]) == ("algebra-0", "\\frac{1}{2}", "level-1")
    write_rows(hub_snapshot(tmp_path, "HuggingFaceH4/aime_2024") / "aime.jsonl", rows.AIME)
    assert [(task["id"], task["answer"]) for task in Aime.tasks("eval")] == [("2024-I-1", "70"), ("2024-I-2", "5")]


def test_examples_are_shown_as_the_dataset_has_them(tmp_path):
    write_rows(tmp_path / "train.jsonl", rows.GSM8K[1:])
    file = write_rows(tmp_path / "test.jsonl", rows.GSM8K[:1])
    (task,) = tasks_of(Gsm8k, file, shots=2, system="Be brief.")
    assert [message["role"] for message in task["prompt"]] == ["system", *["user", "assistant"] * 2, "user"]
    assert task["prompt"][2]["content"] == rows.GSM8K[1]["answer"]
    (task,) = tasks_of(Gsm8k, file, prompt="Question: {question}\nAnswer:")
    assert task["prompt"] == [{"role": "user", "content": f"Question: {rows.GSM8K[0]['question']}\nAnswer:"}]
    mbpp = tasks_of(Mbpp, write_rows(tmp_path / "mbpp.jsonl", rows.MBPP))
    assert [task["id"] for task in mbpp] == ["mbpp-11", "mbpp-12"]
    assert [message["role"] for message in mbpp[0]["prompt"]] == [*["user", "assistant"] * 3, "user"]
    split = write_rows(tmp_path / "full" / "test-00000-of-00001.jsonl", rows.MBPP[3:5])
    assert len(tasks_of(Mbpp, split)[0]["prompt"]) == 1
    write_rows(tmp_path / "full" / "prompt-00000-of-00001.jsonl", rows.MBPP[:3])
    assert [task["prompt"] for task in tasks_of(Mbpp, split)] == [task["prompt"] for task in mbpp]
    with pytest.raises(TaskFileError, match="shots=4, but there are 3 examples"):
        tasks_of(Mbpp, split, shots=4)
    assert mbpp[1]["prompt"][-1]["content"] == (
        "You are an expert Python programmer, and here is your task: Write a function to add 12 to a value. Your code "
        "should pass these tests:\n\nassert add_it(1) == 13\nassert add_it(0) == 12\nassert add_it(-7) == 5\n"
    )


def test_compressed_file_and_folder_are_read(tmp_path):
    file = tmp_path / "HumanEval.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows.HUMANEVAL).encode()))
    for given in (file, tmp_path):
        asked = tasks_of(HumanEval, given)
        assert [task["id"] for task in asked] == ["HumanEval-900", "HumanEval-901", "HumanEval-902"]
    assert rows.HUMANEVAL[0]["prompt"] in asked[0]["prompt"][0]["content"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, ["openai/gsm8k is not in the cache", "hf download --repo-type dataset openai/gsm8k", "--data gsm8k=PATH"]),
        ({"data": "nowhere"}, ["nowhere is no file or folder", "hf download"]),
        ({"data": "."}, ["has none of its files (main/test-*.parquet, test.jsonl,", "hf download"]),
        ({"data": "bad.jsonl"}, ["bad.jsonl, line 1: no 'question' (it has prompt)"]),
        ({"data": "good.jsonl", "shots": 3}, ["shots=3 needs the training file beside"]),
        ({"data": "good.jsonl", "prompt": "{problem}"}, ["is no template of id, question, answer"]),
        ({"date": "good.jsonl"}, ["no setting 'date'; did you mean data?"]),
    ],
)
def test_what_is_missing_is_said_with_what_to_do(tmp_path, monkeypatch, config, said):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "What?"}\n')
    write_rows(tmp_path / "good.jsonl", rows.GSM8K)
    with pytest.raises(TaskFileError) as refused:
        Gsm8k.tasks("eval", config)
    assert [text for text in said if text not in str(refused.value)] == [], refused.value


def test_every_benchmark_says_what_grades_it_and_its_licences():
    for one in BENCHMARKS.values():
        assert all((one.about, one.grader, one.grader_license, one.data_license, one.page, one.how_to_get)), one.name
