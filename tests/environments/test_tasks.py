from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.environments import TaskFileError, read_tasks
from palestra.environments.tasks import Row, labelled_tasks, tasks_of_rows
from palestra.types.rollouts import Task

USER = [{"role": "user", "content": "2+2?"}]


@pytest.fixture
def file(tmp_path):
    def write(*lines, name="tasks.jsonl"):
        path = tmp_path / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


def test_rows_of_our_own_form(file):
    path = file({"id": "a", "prompt": "2+2?", "answer": 4}, "", {"id": 7, "prompt": USER})
    assert read_tasks(path, "sums") == [
        Task(id="a", environment="sums", prompt=USER, extras={"answer": 4}, place=f"{path}, line 1"),
        Task(id="7", environment="sums", prompt=USER, place=f"{path}, line 3"),
    ]


def test_rows_of_skyrl_datasets_keep_all_but_prompt_and_env_class(file):
    row = {
        "id": "q1",
        "data_source": "openai/gsm8k",
        "prompt": USER,
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train"},
    }
    (task,) = read_tasks(file(row), "skyrl_gym:gsm8k")
    assert task.id == "q1"
    assert task.environment == "skyrl_gym:gsm8k"
    assert task.extras == {key: value for key, value in row.items() if key not in ("prompt", "env_class")}


def test_rows_without_id_get_one_of_their_content(file):
    first, second = {"prompt": "a", "n": 1, "m": 2}, {"prompt": "b"}
    tasks = read_tasks(file(first, second, first), "x")
    again = read_tasks(file({"m": 2, "n": 1, "prompt": "a"}), "y")
    assert again[0].id == tasks[0].id
    assert len({task.id for task in tasks}) == 3
    assert tasks[2].id == f"{tasks[0].id}-2"


@given(st.lists(st.fixed_dictionaries({"prompt": st.text(max_size=2)}, optional={"n": st.integers(0, 2)}), max_size=20))
def test_made_ids_are_unique_and_the_same_each_time(rows):
    tasks = tasks_of_rows([Row("here", row) for row in rows], "x")
    assert len({task.id for task in tasks}) == len(rows)
    assert tasks == tasks_of_rows([Row("here", row) for row in rows], "x")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"}', '{"prompt": '], r"tasks.jsonl, line 2: not valid JSON"),
        (["[" * 100_000], "line 1: not valid JSON"),
        (["", '{"id": 1, "question": "a"}'], r"line 2: no 'prompt' \(it has id, question\)"),
        (["{}"], r"line 1: no 'prompt' \(it has nothing\)"),
        (["[1]"], r"line 1: should be a JSON object, but is \[1\]"),
        (['{"prompt": 5}'], "line 1: 'prompt' should be text, or messages with role and content, but is 5"),
        (['{"prompt": []}'], "'prompt' should be text"),
        (['{"prompt": ["a"]}'], "'prompt' should be text"),
        (['{"prompt": [{"role": "user"}]}'], "'prompt' should be text"),
        (['{"prompt": {"role": "user", "content": "a"}}'], "'prompt' should be text"),
        (['{"prompt": "a", "id": null}'], "line 1: 'id' should be text or a whole number, but is None"),
        (['{"prompt": "a", "id": true}'], "'id' should be text or a whole number"),
        (['{"prompt": "a", "id": ""}'], "'id' should be text or a whole number"),
        (
            ['{"prompt": "a", "id": "1"}', "", '{"prompt": "b", "id": 1}'],
            r"line 3: the id '1' is already used at .* line 1",
        ),
        (
            ['{"prompt": "a", "env_class": "x"}', '{"prompt": "a", "env_class": "y"}'],
            "line 2: this task is for env_class 'y'",
        ),
        ([], "has no tasks"),
        (["", "  "], "has no tasks"),
    ],
)
def test_a_wrong_row_is_named_by_file_and_line(file, lines, message):
    with pytest.raises(TaskFileError, match=message):
        read_tasks(file(*lines), "x")


def test_files_that_are_none(tmp_path):
    with pytest.raises(TaskFileError, match=r"nothing.jsonl: cannot be read as a dataset \(No such file"):
        read_tasks(tmp_path / "nothing.jsonl", "x")
    with pytest.raises(TaskFileError, match="directory"):
        read_tasks(tmp_path, "x")
    (tmp_path / "train.parquet").write_text("no table")
    with pytest.raises(TaskFileError, match=r"train.parquet: cannot be read as a table"):
        read_tasks(tmp_path / "train.parquet", "x")
    (tmp_path / "latin").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(TaskFileError, match="line 1: not valid JSON"):
        read_tasks(tmp_path / "latin", "x")


def test_a_file_from_windows_is_read(tmp_path):
    (tmp_path / "dos").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert [task.prompt[0]["content"] for task in read_tasks(tmp_path / "dos", "x")] == ["a", "b"]


def test_own_tasks_get_the_name_they_have_in_the_run():
    tasks = [Task(id=str(i), environment="old", prompt=USER) for i in range(3)]
    labelled = labelled_tasks(tasks, "new")
    assert len(labelled) == 3
    assert {task.environment for task in labelled} == {"new"}
    assert [task.id for task in labelled[1:]] == ["1", "2"]
    assert labelled[-1].environment == "new"
