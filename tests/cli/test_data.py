"""`palestra data`: what it passes, training takes; what it refuses, it names by file and line."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import ipc

from palestra.data.conversations import ConversationFile, conversation_of, pair_of
from palestra.data.errors import DatasetError
from palestra.environments import TaskFileError, read_tasks
from palestra.training.batches.dataset_survey import survey_dataset
from tests.cli.tree import palestra
from tests.pictures import damaged, drawn, file_of

CHATS = [
    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]},
    {"prompt": "What is 3 + 3?", "completion": "It is 6."},
    {"prompt": "What is 3 + 3?", "completion": "It is 6."},
]
PAIRS = [{"prompt": "2 + 2?", "chosen": "4", "rejected": "It is 5."}]
PROMPTS = [{"prompt": "2 + 2?", "answer": 4, "id": "a"}, {"prompt": "2 + 3?", "answer": 5}]


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def to(name: str, rows: list[dict]) -> str:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist([dict.fromkeys(key for one in rows for key in one) | row for row in rows])
        match file.suffix:
            case ".parquet":
                pq.write_table(table, file)
            case ".arrow":
                with file.open("wb") as stream, ipc.new_stream(stream, table.schema) as out:
                    out.write_table(table)
            case _:
                file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return name

    return to


@pytest.mark.parametrize("options", [(), ("--all",)])
def test_damaged_pictures_are_named_with_their_rows(write, tmp_path, options):
    (tmp_path / "whole.png").write_bytes(file_of(drawn()))
    (tmp_path / "cut.png").write_bytes(damaged())
    rows = [{"prompt": "What is it?", "completion": "A cat.", "images": [name]} for name in ("whole.png", "cut.png")]
    done = palestra("data", "check", write("seen.jsonl", rows), *options)
    assert done.exit_code == 1
    assert "seen.jsonl:2: messages[0].content[0]: the picture" in done.stderr
    assert f"{tmp_path}/cut.png: a picture ({len(damaged())} bytes" in done.stderr
    assert "it is damaged or cut short" in done.stderr
    done = palestra("data", "check", write("seen.jsonl", rows[:1]), *options)
    assert (done.exit_code, "all of them good" in done.stdout) == (0, True)


@pytest.mark.parametrize(("rows", "kind"), [(CHATS, "chats"), (PAIRS, "preferences"), (PROMPTS, "prompts")])
@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet", "data.arrow"])
def test_check_knows_all_kinds_in_all_files(write, rows, kind, name):
    done = palestra("data", "check", write(name, rows), "--model", "ephebe", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["ok"], found["kind"], found["rows"]) == (True, kind, len(rows))
    assert found["tokens"]["prompt"]["min"] > 0


def test_first_bad_line_is_named_with_what_to_do(write):
    file = write("data.jsonl", [*CHATS, {"messages": [{"role": "asistant", "content": "Hi"}]}, {"x": 1}])
    done = palestra("data", "check", file)
    assert done.exit_code == 1
    assert done.stderr == "error: data.jsonl:4: messages[0]: unknown role 'asistant'; did you mean assistant?\n"
    assert json.loads(palestra("data", "check", file, "--json").stdout) == {
        "ok": False,
        "file": "data.jsonl",
        "line": 4,
        "error": "messages[0]: unknown role 'asistant'; did you mean assistant?",
    }
    every = palestra("data", "check", file, "--all").stderr.splitlines()
    assert [line.split(": ")[1] for line in every] == ["data.jsonl:4", "data.jsonl:5"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"prompt": "a", "id": 1}', '{"prompt": "b", "id": 1}'], "data.jsonl:2: the id '1' is already used at"),
        (['{"prompt": "a"', ""], "data.jsonl:1: not valid JSON"),
        (["[", "]"], "jq -c '.[]'"),
        (['{"conversations": []}'], "palestra data convert FILE OUT --to messages"),
        (['{"prompt": "a"}', '{"messages": []}'], "data.jsonl:2: no 'prompt'"),
        (['{"responses_create_params": {}}'], "palestra gym collect"),
        ([""], "is empty"),
    ],
)
def test_other_mistakes(tmp_path, monkeypatch, lines, said):
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text("\n".join(lines))
    done = palestra("data", "check", "data.jsonl")
    assert (done.exit_code, said in done.stderr) == (1, True), done.output


def test_stats_are_those_of_training(write):
    from palestra.chat import ChatTokenizer
    from palestra.config.bundled import bundled_model
    from palestra.training.batches.sft_examples import encode_example

    file = write("data.jsonl", CHATS)
    found = json.loads(palestra("data", "stats", file, "--model", "ephebe", "--max-length", 20, "--json").stdout)
    folder = bundled_model("ephebe")
    assert folder is not None
    tokenizer = ChatTokenizer.load(folder)
    examples = [encode_example(tokenizer, one, 1000) for one in ConversationFile(Path(file), conversation_of)]
    lengths = [len(example.sequence.tokens) for example in examples]
    assert found["tokens"]["all"] | {"p50": 0, "p90": 0, "p99": 0} == {
        "min": min(lengths),
        "mean": sum(lengths) / 3,
        "p50": 0,
        "p90": 0,
        "p99": 0,
        "max": max(lengths),
        "total": sum(lengths),
    }
    assert found["tokens"]["learned"]["total"] == sum(example.trained for example in examples)
    assert found["cut"] == sum(length > 20 for length in lengths)
    assert (found["duplicates"], found["roles"]) == (1, {"user": 3, "assistant": 3})
    shown = palestra("data", "stats", file, "--model", "ephebe", "--max-length", 20).stdout
    assert f"the longest row is data.jsonl:{lengths.index(max(lengths)) + 1}" in shown


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["user", "assistant", "", "Hi"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["role", "content"]), inner),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "robot"]), "content": json_values}), max_size=3
)
rows = st.dictionaries(
    st.sampled_from(["messages", "prompt", "completion", "response", "chosen", "rejected", "tools", "id"]),
    messages | json_values,
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(rows, min_size=1, max_size=3))
def test_what_check_passes_training_takes(tmp_path, rows):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        kind = survey_dataset(file, None, None, None).kind
    except DatasetError as error:
        if "unknown form" in error.problem:
            return
        kind = None

    def takes(read) -> bool:
        try:
            return bool(read())
        except (DatasetError, TaskFileError):
            return False

    taken = {
        "chats": takes(lambda: len(ConversationFile(file, conversation_of))),
        "preferences": takes(lambda: len(ConversationFile(file, pair_of))),
        "prompts": takes(lambda: len(read_tasks(file, "x"))),
    }
    for one, is_taken in taken.items():
        try:
            survey_dataset(file, one, None, None)  # type: ignore[arg-type]
        except DatasetError:
            assert not is_taken
        else:
            assert is_taken
    assert kind is None or taken[kind]


def cached(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return tmp_path / "hub" / "datasets--org--sums" / "snapshots" / "abc"


def test_datasets_of_the_hub_are_read_from_the_cache(write, tmp_path, monkeypatch):
    snapshot = cached(monkeypatch, tmp_path).relative_to(tmp_path)
    write(f"{snapshot}/data/train-00000-of-00002.parquet", CHATS[:1])
    write(f"{snapshot}/data/train-00001-of-00002.parquet", CHATS[1:])
    assert json.loads(palestra("data", "check", "org/sums", "--json").stdout)["rows"] == 3
    write(f"{snapshot}/data/test-00000-of-00001.parquet", CHATS[:1])
    several = palestra("data", "check", "org/sums")
    assert (several.exit_code, "org/sums:test" in several.stderr) == (2, True)
    assert json.loads(palestra("data", "check", "org/sums:train", "--json").stdout)["rows"] == 3
    wrong = palestra("data", "check", "org/sums:tset")
    assert (wrong.exit_code, "did you mean test" in wrong.stderr) == (2, True)
    write("datasets/org___made/default/0.0.0/f00/made-train.arrow", PAIRS)
    assert json.loads(palestra("data", "check", "org/made:train", "--json").stdout)["kind"] == "preferences"
    missing = palestra("data", "check", "org/none")
    assert (missing.exit_code, "hf download --repo-type dataset org/none" in missing.stderr) == (2, True)


def test_training_takes_parquet_and_the_hub(write, tmp_path, monkeypatch):
    from palestra.config.train import load_train_config
    from palestra.training.launch import check

    snapshot = cached(monkeypatch, tmp_path).relative_to(tmp_path)
    write(f"{snapshot}/train.parquet", CHATS)
    write("pairs.parquet", PAIRS)
    for kind, source in {"sft": "org/sums", "dpo": "pairs.parquet"}.items():
        check(load_train_config([], [], {"kind": kind, "data": source, "steps": 1}))
    write("tasks.parquet", [{"prompt": "2 + 2?", "answer": 4}])
    assert len(read_tasks(Path("tasks.parquet"), "arithmetic")) == 1


def test_split_and_convert_write_what_they_say(write):
    source = write("data.jsonl", CHATS)
    done = palestra("data", "split", source, "out", "--part", "eval=1", "--seed", 5, "--json")
    assert json.loads(done.stdout)["rows"] == {"train": 2, "eval": 1}
    assert json.loads(Path("out/eval.jsonl").read_text()) == CHATS[0]  # the others are copies of each other
    done = palestra("data", "convert", source, "out.jsonl", "--to", "sharegpt")
    assert (done.exit_code, done.stdout) == (0, "out.jsonl: 3 rows of sharegpt\n")
    assert palestra("data", "check", "out.jsonl").exit_code == 1
    assert palestra("data", "convert", "out.jsonl", "back.jsonl", "--to", "messages").exit_code == 0
    assert palestra("data", "check", "back.jsonl").exit_code == 0


def test_refused_conversion_writes_nothing(write):
    pairs = write("pairs.jsonl", PAIRS)
    done = palestra("data", "convert", pairs, "out.jsonl", "--to", "messages")
    assert (done.exit_code, "pairs.jsonl:1: messages cannot say all of it" in done.stderr) == (1, True)
    assert not Path("out.jsonl").exists()
    assert palestra("data", "convert", pairs, "out.jsonl", "--to", "messages", "--lossy").exit_code == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["check", "data.jsonl", "--max-length", "5"], "--model"),
        (["check", "data.jsonl", "--model", "no/model"], "no/model"),
        (["check", "missing.jsonl"], "missing.jsonl: cannot be read"),
        (["split", "data.jsonl", "out", "--part", "eval"], "eval=200"),
        (["split", "data.jsonl", "out", "--part", "train=1"], "train, which gets the rest"),
        (["split", "data.jsonl", "out", "--part", "eval=200%"], "eval=200"),
        (["convert", "data.jsonl", "out.jsonl", "--to", "alpaca"], "alpaca"),
    ],
)
def test_wrong_arguments_are_one_clear_line(write, args, said):
    write("data.jsonl", CHATS)
    done = palestra("data", *args)
    assert (done.exit_code, said in done.stderr) == (2, True), done.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [["check"], ["stats"], ["split", "--part", "eval=10", "--by", "id"], ["convert", "--to", "sharegpt"]],
    ids=str,
)
def test_large_files_are_read_in_little_memory(tmp_path, command):
    said = "x" * 2000
    row = json.dumps({"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": said}]})
    source = tmp_path / "large.jsonl"
    with source.open("w") as out:
        for number in range(60_000):
            out.write(f'{{"id": {number}, {row[1:]}\n')
    name, *options = command
    outputs = [str(tmp_path / "out")] if name in ("split", "convert") else []
    program = [sys.executable, "-m", "palestra.cli", "data", name, str(source), *outputs, *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    subprocess.run(program, check=True, capture_output=True)
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert source.stat().st_size > 240e6
    assert peak_kib < max(before, 160_000)
