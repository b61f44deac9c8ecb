"""A Modelfile beside a GGUF file: from what Ollama makes a model that it serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from palestra.chat.templates import ChatTemplate
from palestra.chat.tokenizer_files import TokenizerFiles, read_tokenizer
from palestra.checkpoints.gguf.ollama_template import SYSTEM, TOOLS, Head, TemplateTexts, ToolTexts, read_texts

MODELFILE = "Modelfile"
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
"""By the names of generation_config.json."""
_PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""The model's own distribution, where generation_config.json says nothing; Ollama's defaults are others."""


def modelfile(base: Path, *, source: str, name: str, adapter: str | None = None) -> str:
    """`source` is a GGUF file beside it, or the name of a model that Ollama has; `adapter` a GGUF file beside it."""
    files = read_tokenizer(base, needs_template=False)
    lines = [f"# {name}, trained with Palestra. To serve it: ollama create NAME -f {MODELFILE}", f"FROM {source}"]
    if adapter is not None:
        lines.append(f"ADAPTER ./{adapter}")
    if adapter is None:  # the base's own model has a template
        texts = _texts(files)
        if texts is None or '"""' in (template := go_template(texts)):
            lines.append("# This chat template has no translation; Ollama looks for a similar one that it knows.")
        else:
            lines.append(f'TEMPLATE """{template}"""')
    lines += [f"PARAMETER {key} {value}" for key, value in _sampling(base).items()]
    lines += [f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in _stops(files)]
    return "\n".join(lines) + "\n"


def go_template(texts: TemplateTexts) -> str:
    """The texts in the language of Go's text/template, with the names that Ollama fills in."""
    tools = texts.tools
    head = _if("$.System", _head(texts.head_with_system, tools), _head(texts.head, tools))
    if tools is not None:
        with_tools = _if("$.System", _head(tools.head_with_system, tools), _head(tools.head, tools))
        head = _if("$.Tools", with_tools, head)
    user = _if("$started", _text(texts.user), head) + "{{ $started = true }}{{ .Content }}" + _text(texts.user_end)
    answer = _text(texts.answer) + "{{ .Content }}" + ("" if tools is None else _calls(tools))
    answer += _if("not $last", _text(texts.answer_end))
    result = "" if tools is None else _text(tools.result) + "{{ .Content }}" + _text(tools.result_end)
    turn = _if('eq .Role "user"', user, _if('eq .Role "assistant"', answer, _if('eq .Role "tool"', result)))
    last = "{{ $last := eq (len (slice $.Messages $i)) 1 }}"
    asking = _if('and $last (ne .Role "assistant")', _text(texts.prompt))
    return "{{ $started := false }}" + _block("range $i, $_ := .Messages", last + turn + asking)


def _head(head: Head, tools: ToolTexts | None) -> str:
    fills = {SYSTEM: "{{ $.System }}", TOOLS: "" if tools is None else _tools(tools)}
    return "".join(fills.get(part) or _text(part) for part in head)


def _tools(tools: ToolTexts) -> str:
    tool = '{"type": "function", "function": {{ $tool.Function }}}' if tools.whole else "{{ $tool.Function }}"
    return _block("range $n, $tool := $.Tools", _if("$n", _text(tools.between_tools)) + tool)


def _calls(tools: ToolTexts) -> str:
    """Ollama takes the first text behind `if .ToolCalls` for the mark by which it knows a call."""
    after_text = _if(".Content", _block("with .ToolCalls", _text(tools.after_text))) if tools.after_text else ""
    call = "{{ $call.Function.Name }}" + _text(tools.middle) + "{{ $call.Function.Arguments }}"
    calls = _block("range $n, $call := .ToolCalls", _if("$n", _text(tools.between)) + call)
    return after_text + _if(".ToolCalls", _text(tools.open) + calls + _text(tools.close))


def _if(condition: str, then: str, otherwise: str = "") -> str:
    return _block(f"if {condition}", then + ("{{ else }}" + otherwise if otherwise else ""))


def _block(begin: str, inside: str) -> str:
    return "{{ " + begin + " }}" + inside + "{{ end }}"


def _text(text: str) -> str:
    """Braces of the language in a text are written as a constant."""
    return text.replace("{{", '{{ "{{" }}')


def _texts(files: TokenizerFiles) -> TemplateTexts | None:
    if not files.templates:
        return None
    template = ChatTemplate(files.templates, files.named, files.where)
    bos = files.named.get("bos_token", "")
    adds_bos = bool(bos) and files.tokenizer.encode("a").tokens[0] == bos
    return read_texts(
        lambda messages, tools, asks: template.render(messages, tools, asks, {}), _stops(files), bos if adds_bos else ""
    )


def _stops(files: TokenizerFiles) -> list[str]:
    return [text for number in files.eos_ids if (text := files.tokenizer.id_to_token(number))]


def _sampling(base: Path) -> dict[str, Any]:
    file = base / "generation_config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    chosen = {name: settings.get(name) for name in _SAMPLING}
    return {_SAMPLING[name]: _PLAIN[name] if value is None else value for name, value in chosen.items()}
