"""Pictures of rollouts: shown where they stand, sent as files of their kind and nothing else."""

from __future__ import annotations

import pytest

from palestra.chat.picture_files import picture_file
from palestra.runs.writer import RunFolder
from palestra.training.batches.grpo_batch import build_batch
from palestra.types.pictures import PromptPicture
from palestra.types.rollouts import Group
from palestra.util.picture_parts import url_part
from tests.pictures import drawn, file_of
from tests.training.records import group_of, make_config, make_rollout, make_turn

FILE = file_of(drawn(1), "JPEG")
PICTURE = picture_file(FILE)
API = "/api/v1/runs/seen"


@pytest.fixture
def seen(root) -> None:
    """A run whose rollouts have a picture at positions 1 to 3 of their prompts."""
    shown = [
        {"type": "text", "text": "Look: "},
        url_part(f"picture:{PICTURE.digest}"),
        {"type": "text", "text": " What?"},
    ]
    rollouts = [
        make_rollout(
            f"g-{index}",
            float(index),
            [make_turn(3)],
            prompt=[1, 7, 7, 7, 2],
            messages=[{"role": "user", "content": shown}, {"role": "assistant", "content": "A square."}],
            pictures=[PromptPicture(1, 3, PICTURE)],
            picture_files={PICTURE.digest: PICTURE},
        )
        for index in range(2)
    ]
    groups: list[Group] = [group_of("g", rollouts)]
    config = make_config(steps=1)
    with RunFolder.create(root, "seen", config) as folder:
        folder.write_rollouts(1, groups, build_batch(groups, config).sequences)


def test_a_picture_stands_among_the_text_of_its_message(client, seen):
    first, _ = client.get(f"{API}/rollout", params={"step": 1, "id": "g-0"}).json()["messages"]
    kinds = [(piece["kind"], piece["text"]) for piece in first["pieces"]]
    assert kinds == [("text", "Look: "), ("picture", PICTURE.digest), ("text", " What?")]
    page = client.get("/runs/seen/rollout", params={"step": 1, "id": "g-0"}).text
    assert f'runs/seen/picture?digest={PICTURE.digest}"' in page


def test_a_file_is_sent_as_what_it_is(client, seen):
    answer = client.get(f"{API}/picture", params={"digest": PICTURE.digest})
    assert (answer.status_code, answer.content) == (200, FILE)
    assert answer.headers["content-type"] == "image/jpeg"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert "immutable" in answer.headers["cache-control"]


@pytest.mark.parametrize("digest", ["ab" * 32, "../config.json", "", PICTURE.digest.upper(), "ab" * 31 + "/a"])
def test_other_names_are_no_pictures(client, seen, digest):
    answer = client.get(f"{API}/picture", params={"digest": digest})
    assert answer.status_code == 404
    assert "keeps no picture" in answer.text


def test_what_is_no_picture_is_not_sent(client, root, seen):
    (root / "seen" / "pictures" / PICTURE.digest[:2] / PICTURE.digest).write_bytes(b"<script>alert(1)</script>")
    answer = client.get(f"{API}/picture", params={"digest": PICTURE.digest})
    assert answer.status_code == 404
    assert "script" not in answer.text


def test_its_positions_are_one_piece_among_the_tokens(client, seen):
    tokens = client.get(f"{API}/tokens", params={"step": 1, "id": "g-0"}).json()
    assert tokens["texts"][1:4] == [f"[picture {PICTURE.digest[:12]}: 3 positions]", "", ""]
    assert tokens["ids"][1:4] == [7, 7, 7]
