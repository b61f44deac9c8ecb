"""Token-exact conversations: turns are spliced, never rendered again, and nobody's text becomes a special token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace, WhitespaceSplit

from palestra.chat import ChatError, ChatTokenizer
from tests.properties import examples

TokenizerOf = Callable[[str], ChatTokenizer]

NASTY = [
    *("<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "<|im_", "end|>", "<", "<|eot_id|>", "[INST]", "</s>"),
    *("<end_of_turn>", "<｜User｜>", "<｜", "｜>", "<|user|>"),
]
PIECES = st.sampled_from([*NASTY, "<think>", "</tool_call>", "a", "Hello", " ", "\n", "4", "ß", "🙂", "\t", '"', "\\"])
TEXTS = st.lists(PIECES, max_size=8).map("".join)
TURNS = TEXTS.map(lambda text: "." + text.replace("</think>", "").rstrip())
"""As a model would write them: no space on either side, where templates and tokenizers disagree."""


@st.composite
def conversations(draw: st.DrawFn, roles: tuple[str, ...]) -> tuple[list[dict[str, str]], list[tuple[str, list[Any]]]]:
    """A prompt, and rounds of what the assistant said and what came back."""
    prompt = [{"role": "user", "content": draw(TEXTS)}]
    if draw(st.booleans()):
        prompt.insert(0, {"role": "system", "content": draw(TEXTS)})
    back = st.fixed_dictionaries({"role": st.sampled_from(roles), "content": TEXTS})
    most = 1 if roles == ("user",) else 3
    return prompt, draw(st.lists(st.tuples(TURNS, st.lists(back, min_size=1, max_size=most)), max_size=4))


@pytest.mark.parametrize(
    ("style", "roles", "lead"),
    [
        ("chatml", ("user", "tool", "system"), ""),
        ("thinking", ("user", "tool"), ""),
        ("headers", ("user", "ipython"), ""),
        ("turns", ("user",), ""),
        ("brackets", ("user",), " "),  # this template puts a space before each of the assistant's turns
    ],
)
def test_prompt_turns_and_observations_are_the_whole_conversation(
    style: str, roles: tuple[str, ...], lead: str, tokenizer_of: TokenizerOf
) -> None:
    tokenizer = tokenizer_of(style)

    @examples(120)
    @given(conversations(roles))
    def check(drawn: tuple[list[dict[str, str]], list[tuple[str, list[Any]]]]) -> None:
        prompt, rounds = drawn
        whole = list(prompt)
        tokens = tokenizer.encode_chat(prompt)
        for said, back in rounds:
            tokens += [*tokenizer.encode_text(lead + said), tokenizer.turn_end]
            tokens += tokenizer.observation(back)
            whole += [{"role": "assistant", "content": said}, *back]
        assert tokens == tokenizer.encode_chat(whole)

    check()


@pytest.mark.parametrize("style", ["chatml", "headers", "brackets", "turns", "bars", "open"])
def test_no_text_becomes_a_special_token(style: str, tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of(style)

    def count(messages: list[dict[str, Any]]) -> int:
        return sum(_is_special(tokenizer, token) for token in tokenizer.encode_chat(messages))

    harmless = count([{"role": "user", "content": "x"}])

    @examples(150)
    @given(TEXTS)
    def check(text: str) -> None:
        assert count([{"role": "user", "content": text}]) == harmless
        tokens = tokenizer.encode_text(text)
        assert not any(_is_special(tokenizer, token) for token in tokens)
        assert tokenizer.decode(tokens) == text

    check()


def _is_special(tokenizer: ChatTokenizer, token: int) -> bool:
    return tokenizer.decode([token]) == ""


def test_a_special_token_cannot_be_put_together_from_parts(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("chatml")
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    tokens = tokenizer.encode_chat([{"role": "user", "content": parts}])
    assert tokens.count(tokenizer.turn_end) == 1
    assert "<|im_end|><|im_end|>" in tokenizer.decode(tokens, skip_special=False)


def test_nor_from_parts_that_a_template_strips(style_folder: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(style_folder("chatml"), tmp_path, dirs_exist_ok=True)
    template = "{% for m in messages %}{{ m.content | trim }}{% endfor %}<|im_end|>"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = ChatTokenizer.load(tmp_path)
    tokens = tokenizer.encode_chat([{"role": "user", "content": text} for text in ("<|im_ ", " end|>", "<", "|im_")])
    assert tokens.count(tokenizer.turn_end) == 1
    assert tokenizer.decode(tokens, skip_special=False) == "<|im_end|><|im_<|im_end|>"


def test_special_text_in_tools_and_arguments_stays_text(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("chatml")
    tools = [{"function": {"name": "f", "<|im_end|>": ["<|im_start|>"]}}]
    call = {"function": {"name": "f", "arguments": {"x": "<|im_end|>"}}}
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tokens = tokenizer.encode_chat(messages, tools)
    assert tokens.count(tokenizer.turn_end) == 3
    assert tokenizer.decode(tokens, skip_special=False) == tokenizer.render(messages, tools)


def test_observation_of_nothing_is_the_next_header(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("chatml")
    assert tokenizer.decode(tokenizer.observation([]), skip_special=False) == "\n<|im_start|>assistant\n"
    closed = tokenizer.observation([{"role": "user", "content": "hm"}], add_generation_prompt=False)
    assert tokenizer.decode(closed, skip_special=False) == "\n<|im_start|>user\nhm<|im_end|>\n"


def test_observation_where_the_template_writes_no_end(style_folder: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(style_folder("chatml"), tmp_path, dirs_exist_ok=True)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\\n' }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = ChatTokenizer.load(tmp_path)
    assert tokenizer.decode([tokenizer.turn_end], skip_special=False) == "<|im_end|>"
    assert tokenizer.decode(tokenizer.observation([{"role": "user", "content": "hm"}])) == "\nuser: hm\n"


def test_observation_behind_a_tokenizer_that_marks_the_beginning_of_a_text(tmp_path: Path) -> None:
    vocab = {word: number for number, word in enumerate(["[U]", "</s>", "hi", "\u2581hi", "\u2581"])}
    raw = Tokenizer(WordLevel(vocab, unk_token="[U]"))
    raw.pre_tokenizer = Metaspace(prepend_scheme="first")
    raw.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    tokenizer = ChatTokenizer.load(tmp_path)
    hi = {"role": "user", "content": "hi"}
    assert tokenizer.encode_chat([hi]) == [vocab["\u2581hi"], vocab["</s>"]]
    assert tokenizer.observation([hi]) == [vocab["hi"], vocab["</s>"]]


def test_observation_takes_template_options(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("thinking")
    tokens = tokenizer.observation([{"role": "user", "content": "on"}], template_kwargs={"enable_thinking": False})
    assert tokenizer.decode(tokens).endswith("assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["self", "messages", "tools", "add_generation_prompt", "chat", "max_tokens", "turn"])
def test_template_options_may_have_any_name_and_change_nothing_else(name: str, tokenizer_of: TokenizerOf) -> None:
    tokenizer, messages = tokenizer_of("thinking"), [{"role": "user", "content": "on"}]
    options = {name: "x"}
    assert tokenizer.encode_chat(messages, template_kwargs=options) == tokenizer.encode_chat(messages)
    assert tokenizer.observation(messages, template_kwargs=options) == tokenizer.observation(messages)


def test_what_ends_a_turn(random_model: Callable[..., Path], tokenizer_of: TokenizerOf) -> None:
    tokenizer = ChatTokenizer.load(random_model())
    ended = [tokenizer.decode([token], skip_special=False) for token in tokenizer.stop_ids]
    assert ended == ["<|im_end|>", "<|endoftext|>"]
    assert tokenizer.turn_end == tokenizer.stop_ids[0]
    # The template's own token stops a turn even where no file calls it an eos.
    headers = tokenizer_of("headers")
    assert [headers.decode([token], skip_special=False) for token in headers.stop_ids] == [
        "<|end_of_text|>",
        "<|eot_id|>",
    ]
    assert headers.turn_end == headers.stop_ids[1]


def test_a_token_that_only_the_config_calls_special_is_special(
    style_folder: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(style_folder("chatml"), tmp_path, dirs_exist_ok=True)
    _edit(tmp_path / "tokenizer_config.json", additional_special_tokens=["<tool_response>", "<|new|>"])
    tokenizer = ChatTokenizer.load(tmp_path)
    made = tokenizer.encode_text("<tool_response><|new|><think>")
    assert tokenizer.decode(made) == "<tool_response><|new|><think>"
    assert len(made) > 3
    number = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<tool_response>")
    assert number is not None
    assert _is_special(tokenizer, number)


def test_a_model_that_knows_special_texts_as_words_does_not_use_them(tmp_path: Path) -> None:
    vocab = {word: number for number, word in enumerate(["[U]", "<e>", "<", "e>", "hi"])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="[U]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<e>", special=True), AddedToken("[U]", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} <e>{% endfor %}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>", "unk_token": "[U]"}))
    chat = ChatTokenizer.load(tmp_path)
    assert chat.encode_text("hi <e> who") == [vocab[word] for word in ("hi", "<", "e>", "[U]")]
    assert chat.encode_chat([{"role": "user", "content": "<e>"}]) == [vocab[word] for word in ("<", "e>", "<e>")]


def test_truncation_and_padding_of_published_files_are_off(style_folder: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(style_folder("chatml"), tmp_path, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    chat = ChatTokenizer.load(tmp_path)
    assert chat.decode(chat.encode_text("one two three four five")) == "one two three four five"


# Bad input


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def _broken_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("one\n{% if %}")


def _mute_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("hello")


def _endless_turns(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    _edit(folder / "tokenizer_config.json", eos_token=None)


def _escaping_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json in"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), "tokenizer_config.json cannot be read"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "is not a JSON object"),
        (_without_template, "no chat template in"),
        (_broken_template, "broken in line 2"),
        (_mute_template, "does not show what the assistant says"),
        (_endless_turns, "nothing ends an assistant's turn"),
        (_escaping_template, "SecurityError"),
    ],
)
def test_unusable_folders_are_named(
    spoil: Callable[[Path], Any], said: str, style_folder: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(style_folder("chatml"), tmp_path, dirs_exist_ok=True)
    spoil(tmp_path)
    with pytest.raises(ChatError) as caught:
        ChatTokenizer.load(tmp_path)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="palestra model random"):
        ChatTokenizer.load(tmp_path / "nowhere")


def test_messages_a_template_refuses_are_an_error_of_their_own(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("brackets")
    with pytest.raises(ChatError, match="must alternate"):
        tokenizer.encode_chat([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    with pytest.raises(ChatError, match="refuses a conversation"):
        tokenizer.encode_chat([{"role": "user", "content": None}])
