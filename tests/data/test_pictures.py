"""Pictures of rows, in every form that datasets have them: the same parts, and errors that name the row."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from palestra.data.conversations import Conversation, ConversationFile, conversation_of, labelled_of, pair_of
from palestra.data.conversion import convert_dataset
from palestra.data.errors import DatasetError
from palestra.data.layouts import Layout
from palestra.data.splitting import by_prompt, split_dataset
from palestra.environments.tasks import read_tasks
from palestra.util.picture_parts import file_path, url_of, url_part
from tests.pictures import data_url, drawn, file_of

FILE, OTHER = file_of(drawn(1)), file_of(drawn(2), "JPEG")
BASE64 = base64.b64encode(FILE).decode()
ANSWER = {"role": "assistant", "content": "A square."}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.png").write_bytes(FILE)
    (tmp_path / "images" / "2.jpg").write_bytes(OTHER)
    return tmp_path


def conversations(folder: Path, *rows: Any) -> ConversationFile:
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ConversationFile(folder / "data.jsonl", conversation_of)


def read(file: Path) -> list[Conversation]:
    rows = ConversationFile(file, conversation_of)
    return [rows[index] for index in range(len(rows))]


def asked(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


PLACE = {"type": "image"}
LOOK = {"role": "user", "content": "Look."}


@pytest.mark.parametrize(
    "row",
    [
        asked(PLACE, text("Look.")) | {"images": ["images/1.png"]},
        asked(text("<image>Look.")) | {"image": "images/1.png"},
        {"messages": [{"role": "user", "content": "<image>Look."}, ANSWER], "images": ["images/1.png"]},
        {"messages": [LOOK, ANSWER], "images": ["images/1.png"]},
        {"prompt": "Look.", "completion": "A square.", "images": ["images/1.png"]},
        {"prompt": "<image>Look.", "response": "A square.", "images": [{"path": "images/1.png", "bytes": None}]},
        asked({"type": "image", "image": "images/1.png"}, text("Look.")),
        asked({"type": "image", "path": "images/1.png"}, text("Look.")),
        asked({"type": "image_url", "image_url": {"url": "images/1.png"}}, text("Look.")),
    ],
)
def test_every_form_of_a_file_is_the_same(folder, row):
    rows = conversations(folder, row)
    message, answer = rows[0].messages
    assert message["content"] == [url_part((folder / "images" / "1.png").as_uri()), text("Look.")]
    assert answer == ANSWER
    assert rows.first_picture == rows.place(0)
    assert (
        "images"
        in json.loads(rows.lines[0])["messages" if "messages" in row else "prompt"][0]["content"][0]["image_url"]["url"]
    )


@pytest.mark.parametrize("image", [data_url(FILE), BASE64, {"bytes": BASE64, "path": "somewhere.png"}])
def test_files_may_be_in_the_rows(folder, image):
    (seen,) = conversations(folder, asked(PLACE) | {"images": [image]})[0].messages[0]["content"]
    assert str(url_of(seen)).partition(",")[2] == BASE64


def test_an_empty_column_leaves_rows_of_text_as_they_are(folder):
    row = {"prompt": "Which tag shows a picture?", "completion": "<image>", "images": None}
    assert conversations(folder, row)[0].messages[1]["content"] == "<image>"


def test_parquet_files_of_the_hub_have_bytes(folder):
    content = [{"type": "image", "text": None}, {"type": "text", "text": "Look."}]
    rows = [{"messages": [{"role": "user", "content": content}], "images": [{"bytes": FILE, "path": None}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data.parquet")
    (message,) = ConversationFile(folder / "data.parquet", conversation_of)[0].messages
    assert message["content"] == [url_part(f"data:;base64,{BASE64}"), text("Look.")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "<image>Look.", "completion": "A square.", "images": ["images/1.png"]},
        {"prompt": "<image>Look.", "completion": "A square.", "images": [{"path": "images/1.png"}]},
        asked({"type": "image", "image": "images/1.png"}, text("Look.")),
        asked({"type": "image_url", "image_url": {"url": "images/1.png"}}, text("Look.")),
    ],
)
def test_files_in_other_folders_lead_to_the_same_pictures(folder, row):
    conversations(folder, row, {"prompt": "2 + 2?", "completion": "4"})
    split_dataset(folder / "data.jsonl", {"eval": 1}, folder / "deep" / "parts", group=by_prompt, seed=0)
    convert_dataset(folder / "data.jsonl", folder / "other" / "data.jsonl", Layout.MESSAGES, lossy=False)
    parts = [folder / "deep" / "parts" / "train.jsonl", folder / "deep" / "parts" / "eval.jsonl"]
    split, converted = ([*read(parts[0]), *read(parts[1])], read(folder / "other" / "data.jsonl"))
    for rows in (split, converted):
        shown = [one.messages[0]["content"] for one in rows if isinstance(one.messages[0]["content"], list)]
        assert [file_path(str(url_of(part))).resolve() for part, _ in shown] == [folder / "images" / "1.png"]
        assert len(rows) == 2


def test_pairs_show_both_answers_the_same_pictures(folder):
    row = {"prompt": "<image><image>?", "chosen": "yes", "rejected": "no", "images": ["images/1.png", "images/2.jpg"]}
    (folder / "data.jsonl").write_text(json.dumps(row))
    pair = ConversationFile(folder / "data.jsonl", pair_of)[0]
    assert pair.chosen.messages[0] == pair.rejected.messages[0]
    assert [part["type"] for part in pair.chosen.messages[0]["content"]] == ["image_url", "image_url", "text"]
    assert len(ConversationFile(folder / "data.jsonl", labelled_of)[0]) == 2


def test_tasks_show_pictures_where_their_prompts_have_places(folder):
    rows = [
        {"prompt": "<image>How many?", "images": ["images/1.png"], "answer": 3},
        {"prompt": "How many?", "image": "a column of the environment"},
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seeing, other = read_tasks(folder / "tasks.jsonl", "shown")
    assert seeing.prompt[0]["content"][0] == url_part((folder / "images" / "1.png").as_uri())
    assert seeing.extras == {"answer": 3}
    assert other.extras == {"image": "a column of the environment"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (asked(PLACE) | {"images": ["images/3.png"]}, r"images\[0\]: there is no picture .*images/3.png"),
        (asked({"type": "image", "image": "3.png"}), r"messages: there is no picture .*3.png"),
        (asked(PLACE) | {"images": ["https://example.com/a.png"]}, "is not fetched; download it"),
        (asked(PLACE) | {"images": [7]}, "a picture should be a path"),
        (
            asked(PLACE, PLACE) | {"images": ["images/1.png"]},
            r"more places for pictures than the row has pictures \(1\)",
        ),
        (asked(PLACE) | {"images": ["images/1.png"] * 2}, "messages has 1 places for the row's 2 pictures"),
        (asked(PLACE), r"more places for pictures than the row has pictures \(0\)"),
        ({"messages": [ANSWER], "images": ["images/1.png"]}, "no message of the user in 'messages'"),
        ({"messages": ["Look."], "images": ["images/1.png"]}, "no message of the user in 'messages'"),
        ({"messages": [{"role": "user"}, ANSWER], "images": ["images/1.png"]}, r"messages\[0\]: .* has no content"),
        (asked(text("<image>Look.")) | {"images": []}, "a text has <image>, but the row's column of pictures is empty"),
        (asked(PLACE) | {"images": ["x" * 5000]}, r"images\[0\]: there is no picture"),
        (asked(PLACE) | {"images": ["file:///dev/zero"]}, r"images\[0\]: there is no picture /dev/zero"),
        (asked(PLACE) | {"images": ["file:///nowhere.png"]}, r"images\[0\]: there is no picture /nowhere.png"),
    ],
)
def test_what_is_wrong_is_named_with_its_row(folder, row, said):
    with pytest.raises(DatasetError, match=rf"data.jsonl, line 2: .*{said}"):
        conversations(folder, {"messages": [LOOK, ANSWER]}, row)
