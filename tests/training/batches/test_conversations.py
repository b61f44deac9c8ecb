"""Conversation files become exactly the tokens a model would see and say; wrong ones name their line."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.chat import ChatError, ChatTokenizer
from palestra.data.conversations import Conversation, ConversationFile, conversation_of, pair_of
from palestra.data.errors import DatasetError
from palestra.training.batches.data_order import DataOrder
from palestra.training.batches.sft_examples import encode_example
from tests.chat.conftest import bare_folder, style_folder, tokenizer_of  # noqa: F401 - fixtures
from tests.training.scripted import chat_tokenizer

LIMIT = 10_000
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 more?"},
    {"role": "assistant", "content": "7"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def write(folder: Path, *rows: object, name: str = "data.jsonl") -> Path:
    file = folder / name
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return file


def learned(tokenizer, example) -> list[str]:
    """What is trained on, as texts of stretches."""
    sequence, texts = example.sequence, [[]]
    for token, trained in zip(sequence.tokens, sequence.mask, strict=True):
        if trained:
            texts[-1].append(token)
        elif texts[-1]:
            texts.append([])
    return [tokenizer.decode(text, skip_special=False) for text in texts if text]


# Turns


@pytest.mark.parametrize("style", ["chatml", "headers", "brackets"])
def test_a_row_is_the_templates_own_rendering(tokenizer_of, style):  # noqa: F811
    tokenizer = tokenizer_of(style)
    tokens = encode_example(tokenizer, Conversation(TALK), LIMIT).sequence.tokens
    whole = tokenizer.encode_chat(TALK, add_generation_prompt=False)
    assert tokens == whole[: len(tokens)]
    assert tokenizer.decode(whole[len(tokens) :], skip_special=False).strip() == ""


@pytest.mark.parametrize(
    ("style", "said"),
    [
        ("chatml", ["4<|im_end|>", "7<|im_end|>"]),
        ("headers", ["4<|eot_id|>", "7<|eot_id|>"]),
        ("brackets", [" 4</s>", " 7</s>"]),
        ("thinking", ["<think>\n\n</think>\n\n4<|im_end|>", "<think>\n\n</think>\n\n7<|im_end|>"]),
    ],
)
def test_what_the_assistant_says_is_learned_with_its_end_and_without_its_header(tokenizer_of, style, said):  # noqa: F811
    tokenizer = tokenizer_of(style)
    example = encode_example(tokenizer, Conversation(TALK), LIMIT)
    assert learned(tokenizer, example) == said
    assert example.sequence.advantages == [float(trained) for trained in example.sequence.mask]
    assert not example.is_cut
    assert learned(tokenizer, encode_example(tokenizer, Conversation(TALK), LIMIT, last_only=True)) == said[-1:]


def test_the_prompt_of_a_row_is_what_a_rollout_begins_with(tokenizer_of):  # noqa: F811
    """Also where the template leaves earlier reasoning out: turns then follow each other as in a rollout."""
    tokenizer = tokenizer_of("thinking")
    example = encode_example(tokenizer, Conversation(TALK), LIMIT)
    first = tokenizer.encode_chat(TALK[:2])
    assert example.sequence.tokens[: len(first)] == first
    between = tokenizer.decode(tokenizer.observation(TALK[3:4]), skip_special=False)
    assert between in tokenizer.decode(example.sequence.tokens, skip_special=False)
    last = encode_example(tokenizer, Conversation(TALK), LIMIT, last_only=True).sequence
    assert last.tokens[: last.mask.index(True)] == tokenizer.encode_chat(TALK[:4])


def test_tools_and_calls_are_part_of_the_row():
    tokenizer = chat_tokenizer()
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    example = encode_example(tokenizer, Conversation(messages, TOOLS), LIMIT)
    call_text, answer = learned(tokenizer, example)
    assert '"name": "add"' in call_text
    assert answer == "It is 5.<|im_end|>"
    whole = tokenizer.encode_chat(messages, TOOLS, add_generation_prompt=False)
    assert example.sequence.tokens == whole[: len(example.sequence.tokens)]


def test_a_prompt_is_never_learned_even_what_the_assistant_says_in_it():
    tokenizer = chat_tokenizer()
    row = {"prompt": TALK[:4], "completion": "7"}
    assert learned(tokenizer, encode_example(tokenizer, conversation_of(row), LIMIT)) == ["7<|im_end|>"]


def test_text_that_looks_like_the_end_of_a_turn_stays_text():
    tokenizer = chat_tokenizer()
    messages = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "<|im_end|> is a word"}]
    example = encode_example(tokenizer, Conversation(messages), LIMIT)
    assert learned(tokenizer, example) == ["<|im_end|> is a word<|im_end|>"]
    assert example.sequence.tokens.count(tokenizer.turn_end) == 2


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_is_learned_whole_behind_its_prompt(question, answer):
    """A turn that begins with a line break would share a token with its header."""
    tokenizer = chat_tokenizer()
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "\n" + answer}]
    example = encode_example(tokenizer, Conversation(messages), LIMIT)
    prompt = tokenizer.encode_chat(messages[:1])
    assert example.sequence.tokens[: len(prompt)] == prompt
    assert example.sequence.mask == [False] * len(prompt) + [True] * example.trained
    whole = tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert tokenizer.decode(example.sequence.tokens, False) == tokenizer.decode(whole, False).removesuffix("\n")


def test_a_long_row_keeps_its_beginning():
    tokenizer = chat_tokenizer()
    whole = encode_example(tokenizer, Conversation(TALK), LIMIT)
    limit = len(whole.sequence.tokens) - 3
    cut = encode_example(tokenizer, Conversation(TALK), limit)
    assert cut.is_cut
    assert cut.sequence.tokens == whole.sequence.tokens[:limit]
    assert cut.sequence.mask == whole.sequence.mask[:limit]
    assert encode_example(tokenizer, Conversation(TALK), 5).trained == 0


def test_a_row_where_the_assistant_is_silent_teaches_nothing():
    example = encode_example(chat_tokenizer(), Conversation(TALK[:2]), LIMIT)
    assert (example.trained, example.sequence.tokens) == (0, [])


def test_a_template_that_writes_another_header_for_a_turn_to_come_is_refused(style_folder, tmp_path):  # noqa: F811
    folder = shutil.copytree(style_folder("chatml"), tmp_path / "other")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{%- if add_generation_prompt -%}{{- 'Well: ' -}}{%- endif -%}")
    with pytest.raises(ChatError, match=r"begins an assistant's turn differently.*'Well"):
        encode_example(ChatTokenizer.load(folder), Conversation(TALK), LIMIT)


# Files


def test_every_form_of_a_row_is_understood(tmp_path):
    rows = ConversationFile(
        write(
            tmp_path,
            {"messages": TALK, "tools": TOOLS},
            "",
            {"prompt": "Hi", "completion": "Hello"},
            {"prompt": TALK[:2], "response": "4"},
            {"prompt": "Hi", "completion": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
        ),
        conversation_of,
    )
    assert [len(rows[i].messages) for i in range(len(rows))] == [5, 2, 3, 2]
    assert [rows[i].first for i in range(len(rows))] == [0, 1, 2, 1]
    assert rows[0].tools == TOOLS
    assert str(rows.place(1)) == f"{tmp_path / 'data.jsonl'}, line 3"


def test_pairs_share_their_prompt(tmp_path):
    chosen = [*TALK[:2], {"role": "assistant", "content": "4"}]
    rows = ConversationFile(write(tmp_path, {"prompt": TALK[:2], "chosen": chosen, "rejected": "5"}), pair_of)
    assert rows[0].chosen.messages[:2] == rows[0].rejected.messages[:2] == TALK[:2]
    assert rows[0].chosen.messages[2:] == chosen[2:]
    assert rows[0].rejected.messages[2:] == [{"role": "assistant", "content": "5"}]
    assert rows[0].chosen.first == rows[0].rejected.first == 2


GOOD = {"messages": TALK}


@pytest.mark.parametrize(
    ("rows", "parse", "said"),
    [
        ([GOOD, '{"messages": ['], conversation_of, "line 2: not valid JSON"),
        ([GOOD, "[1]"], conversation_of, "line 2: should be a JSON object, but is [1]"),
        ([{"text": "Hi"}], conversation_of, "line 1: neither 'messages' nor 'prompt' (it has 'text')"),
        ([{}], conversation_of, "line 1: neither 'messages' nor 'prompt' (it is empty)"),
        ([{"messages": []}], conversation_of, "'messages' should be a list of messages, but is []"),
        ([{"messages": "Hi"}], conversation_of, "'messages' should be a list of messages, but is 'Hi'"),
        ([{"messages": ["Hi"]}], conversation_of, "messages[0] should be an object with role and content"),
        (
            [{"messages": [{"role": "asistant", "content": "Hi"}]}],
            conversation_of,
            "line 1: messages[0]: unknown role 'asistant'; did you mean assistant?",
        ),
        ([{"messages": [{"content": "Hi"}]}], conversation_of, "messages[0]: unknown role None; there are: system"),
        ([{"messages": [{"role": "user"}]}], conversation_of, "messages[0]: content should be text"),
        ([{"messages": TALK, "tools": "add"}], conversation_of, "'tools' should be a list of objects, but is 'add'"),
        ([{"prompt": "Hi"}], conversation_of, "no 'response' (it has 'prompt')"),
        (
            [{"prompt": 3, "completion": "Hi"}],
            conversation_of,
            "'prompt' should be text or a list of messages, but is 3",
        ),
        ([{"prompt": "Hi", "chosen": "Ho"}], pair_of, "no 'rejected' (it has 'prompt, chosen')"),
        ([{"chosen": "a", "rejected": "b"}], pair_of, "no 'prompt' (it has 'chosen, rejected')"),
        ([{"prompt": "Hi", "chosen": TALK[1:2], "rejected": "b"}], pair_of, "'chosen' has no text of the assistant"),
        ([], conversation_of, "is empty"),
        (["  ", ""], conversation_of, "is empty"),
    ],
)
def test_a_wrong_row_is_named_before_anything_is_trained(tmp_path, rows, parse, said):
    with pytest.raises(DatasetError) as error:
        ConversationFile(write(tmp_path, *rows), parse)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "data.jsonl"))


def test_a_missing_file_and_one_of_another_kind_say_so(tmp_path):
    with pytest.raises(DatasetError, match=r"missing\.jsonl: cannot be read .*No such file"):
        ConversationFile(tmp_path / "missing.jsonl", conversation_of)
    (tmp_path / "data.parquet").write_text("no table")
    with pytest.raises(DatasetError, match=r"data\.parquet: cannot be read as a table"):
        ConversationFile(tmp_path / "data.parquet", conversation_of)


# Order


def test_each_pass_has_every_row_once_in_another_order():
    order = DataOrder(10, 3, lambda row: row)
    passes = [order.draw(position, 10).items for position in (0, 10, 20)]
    assert [sorted(one) for one in passes] == [list(range(10))] * 3
    assert len({tuple(one) for one in passes}) == 3
    assert order.draw(0, 10).items == passes[0]
    assert DataOrder(10, 4, lambda row: row).draw(0, 10).items != passes[0]


@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 2**32))
def test_drawing_on_from_a_position_is_as_if_never_interrupted(count, size, seed):
    """Rows that teach nothing are passed over and counted."""
    empty = set(random.Random(seed).sample(range(count), count // 2))
    order, position, drawn = DataOrder(count, seed, lambda row: None if row in empty else row), 0, []
    skipped = 0
    for _ in range(5):
        batch = DataOrder(count, seed, lambda row: None if row in empty else row).draw(position, size)
        drawn += batch.items
        position, skipped = batch.position, skipped + batch.skipped
    whole = order.draw(0, 5 * size)
    assert (whole.items, whole.position, whole.skipped) == (drawn, position, skipped)
    assert position == len(drawn) + skipped


def test_data_that_teaches_nothing_ends_the_run_instead_of_looking_for_ever():
    with pytest.raises(DatasetError, match="none of 3 rows has text of the assistant"):
        DataOrder(3, 0, lambda row: None).draw(2, 1)
