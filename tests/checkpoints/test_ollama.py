"""Folders for Ollama: a Modelfile whose template writes what the model's own writes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from palestra.chat.templates import ChatTemplate
from palestra.checkpoints import CheckpointError
from palestra.checkpoints.export import export_checkpoint
from palestra.checkpoints.export_check import check_export
from palestra.checkpoints.gguf.ollama_model import go_template
from palestra.checkpoints.gguf.ollama_template import TemplateTexts, compose, read_texts
from palestra.runs.export_form import GgufSettings
from tests.checkpoints.conftest import write_adapter
from tests.checkpoints.gguf_models import with_qwen_words

ROOT = Path(__file__).parents[2]
GO = ROOT / ".venv-llama" / "bin" / "go"
TEMPLATES = [*(ROOT / "tests/chat/templates").glob("*.jinja"), ROOT / "palestra/testing/data/chatml.jinja"]
KNOWN = {"chatml", "thinking", "turns", "headers", "brackets", "bars"}
WITH_TOOLS = {"chatml", "thinking", "bars"}

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TALK = [
    {"role": "user", "content": "What is {{ this }}?"},
    {"role": "assistant", "content": "A question."},
    {"role": "user", "content": "And 2 more?"},
]
TOOL_TALK = [
    *TALK,
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "4", "name": "add", "tool_call_id": "call00000"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Thanks."},
]
SYSTEM = {"role": "system", "content": "Be short."}


def _template(file: Path) -> ChatTemplate:
    return ChatTemplate({"default": file.read_text()}, {"bos_token": "<bos>", "eos_token": "<|end|>"}, str(file))


def _texts(file: Path) -> TemplateTexts | None:
    template = _template(file)
    stops = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"]
    return read_texts(lambda messages, tools, asks: template.render(messages, tools, asks, {}), stops, "<bos>")


def _talks(texts: TemplateTexts) -> list[tuple[list, list | None]]:
    """Conversations with their tools."""
    plain = [(talk, None) for talk in (TALK, TALK[:1], [SYSTEM, *TALK])]
    return plain if texts.tools is None else [*plain, ([SYSTEM, *TOOL_TALK], [ADD, ADD]), (TOOL_TALK, [ADD])]


def test_templates_are_translated_with_their_tools_or_not_at_all():
    found = {file.stem: _texts(file) for file in TEMPLATES}
    assert {name for name, texts in found.items() if texts is not None} >= KNOWN
    assert {name for name, texts in found.items() if texts is not None and texts.tools is not None} == WITH_TOOLS
    for file in TEMPLATES:
        if (texts := found[file.stem]) is not None:
            for messages, tools in _talks(texts):
                expected = _template(file).render(messages, tools, True, {}).removeprefix("<bos>")
                assert compose(texts, messages, tools) == expected, file.stem


@pytest.mark.slow
@pytest.mark.skipif(not GO.exists(), reason="Go is not installed; run: make llama-cpp")
@pytest.mark.parametrize("name", sorted(KNOWN))
def test_go_fills_the_template_with_what_the_model_was_trained_on(name, tmp_path):
    file = next(file for file in TEMPLATES if file.stem == name)
    texts = _texts(file)
    assert texts is not None
    talks = _talks(texts)
    given = {"Template": go_template(texts), "Conversations": [_as_go(*talk) for talk in talks]}
    environment = os.environ | {"GOCACHE": "/tmp/palestra-go", "GOPATH": str(tmp_path), "GO111MODULE": "off"}
    command = [str(GO), "run", str(Path(__file__).with_name("ollama_template.go"))]
    done = subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    expected = [_template(file).render(*talk, True, {}).removeprefix("<bos>") for talk in talks]
    assert json.loads(done.stdout) == expected


def _as_go(messages: list, tools: list | None) -> dict:
    """What Ollama hands to a template."""

    def call(one: dict) -> dict:
        function = one["function"]
        return {"Function": {"Name": function["name"], "Arguments": json.dumps(function["arguments"])}}

    return {
        "System": "".join(one["content"] for one in messages if one["role"] == "system"),
        "Messages": [
            {"Role": m["role"], "Content": m["content"], "ToolCalls": [call(c) for c in m.get("tool_calls", [])]}
            for m in messages
        ],
        "Tools": [{"Function": json.dumps(tool["function"])} for tool in tools or []],
    }


def test_a_whole_model_comes_with_its_template_stops_and_sampling(random_model, tmp_path):
    base = with_qwen_words(random_model(), tmp_path / "base")
    file = base / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 0.6, "top_p": 0.95}))
    write_adapter(base, tmp_path / "adapter", 3)
    export_checkpoint(
        tmp_path / "adapter", tmp_path / "out", "ollama", base=base, base_name="org/small", gguf=GgufSettings("q8_0")
    )
    said = (tmp_path / "out" / "Modelfile").read_text()
    assert said.startswith("# org/small, trained with Palestra")
    assert "\nFROM ./model.gguf\n" in said
    assert "<|im_start|>assistant\n" in said.partition('TEMPLATE """')[2].partition('"""')[0]
    sampling = ["temperature 0.6", "top_p 0.95", "top_k 0", "min_p 0.0", "repeat_penalty 1.0"]
    assert said.endswith(
        "".join(f"PARAMETER {one}\n" for one in [*sampling, 'stop "<|im_end|>"', 'stop "<|endoftext|>"'])
    )
    assert check_export(tmp_path / "out", "ollama", tmp_path / "adapter", base).is_good


def test_an_adapter_goes_onto_a_model_that_ollama_has(random_model, tmp_path):
    base = random_model(tie=False)
    write_adapter(base, tmp_path / "adapter", 3)
    settings = GgufSettings(ollama_base="qwen3:0.6b")
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "ollama", base=base, gguf=settings)
    said = (tmp_path / "out" / "Modelfile").read_text()
    assert "\nFROM qwen3:0.6b\nADAPTER ./adapter.gguf\n" in said
    assert "TEMPLATE" not in said
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"Modelfile", "adapter.gguf"}
    with pytest.raises(CheckpointError, match="--ollama-base is for --as ollama"):
        export_checkpoint(tmp_path / "adapter", tmp_path / "no", "gguf", base=base, gguf=settings)
