"""A puppet: a small model whose weights are written, not learned, so that it says given words at given cues.

With it agents, tools, streams and captured tokens are tested without a model's ability: it calls the tools that its
script names, whatever the prompt around the cue, and its log-probabilities are real. It is a Llama of one layer:

- Each answer of the script is a chain of tokens that occur nowhere else in the script. The output layer knows which
  token follows which, and the last one is followed by the end of the turn.
- Each cue is one token too. The attention finds the cue of the highest rank in the context, and its value is the
  direction of the first token of that cue's answer. Inside a chain the next token outweighs it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as InSequence

from palestra.testing.random_tokenizer import (
    TURN_END,
    WORD_PATTERN,
    TokenizerIds,
    corpus,
    train_bpe,
    with_control_tokens,
    write_tokenizer_files,
)

BASE_VOCAB = 1024
PIECE = re.compile(r"\s*\w+|\s*[^\w\s]|\s+")
MOST_CUES = 128  # their ranks are exact in bfloat16, in steps of 1/128

ONE, RANK, FILLER, FIRST_CODE = 0, 1, 2, 3
"""Dimensions of the residual stream: a constant, the rank of a cue, what makes all embeddings equally long."""
LOGIT = 20.0  # by which the right token leads: all others together stay below one in 10,000
RANK_SCORE = 30.0  # by which the attention prefers a cue to the next lower one: e^30 outweighs any context
LOWEST_ROPE = 1e12  # so that the last pair of each head does not turn within a million tokens


class ScriptError(ValueError):
    """A script that no puppet can play."""


class Cue(Struct, frozen=True, forbid_unknown_fields=True):
    """When `when` occurs in the context, the puppet answers `say`; of several cues the last one counts."""

    say: str
    when: str = ""
    """Without it, the entry of a script that is read is the answer without any cue."""


@dataclass(frozen=True, slots=True)
class _Chains:
    tokens: list[str]
    """Every token of the script: cues and pieces of answers."""
    answers: list[list[str]]
    """The tokens of each cue's answer; the first one is the answer without any cue."""


OTHERWISE = "I have nothing to say."


def read_script(text: str) -> tuple[list[Cue], str]:
    """Returns the cues of a script in JSON, and the answer without any cue."""
    try:
        cues = msgspec.json.decode(text, type=list[Cue])
    except msgspec.DecodeError as error:
        raise ScriptError(f"the script is not a JSON list of {{when, say}}: {error}") from None
    otherwise = [cue.say for cue in cues if not cue.when]
    if len(otherwise) > 1:
        raise ScriptError(
            f"{len(otherwise)} entries of the script have no `when`; one is the answer to everything else"
        )
    return [cue for cue in cues if cue.when], otherwise[0] if otherwise else OTHERWISE


def make_puppet(
    folder: str | Path,
    script: Sequence[Cue],
    *,
    otherwise: str = OTHERWISE,
    context: int = 131072,
    chat_template: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a puppet that `transformers` loads. `otherwise` is its answer without any cue in the context.

    A cue of the next step may stand in an answer, or in the result of the tool that the answer calls. `chat_template`
    is the text of a Jinja template whose turns end with `<|im_end|>`. [ChatML with Hermes tools]
    """
    chains = _chains(script, otherwise)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(chains.tokens)
    ids = write_tokenizer_files(folder, tokenizer, context, chat_template)
    config = _config(len(chains.tokens), len(script), tokenizer.get_vocab_size(), context, ids)
    _write_json(folder / "config.json", config | {"dtype": str(dtype).removeprefix("torch.")})
    _write_json(folder / "generation_config.json", {"do_sample": True, "eos_token_id": ids.turn_end})
    tensors = _weights(config, script, chains, tokenizer)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _chains(script: Sequence[Cue], otherwise: str) -> _Chains:
    cues = [cue.when for cue in script]
    if len(cues) > MOST_CUES:
        raise ScriptError(f"{len(cues)} cues; a puppet knows at most {MOST_CUES}")
    for cue in cues:
        if len(cue) < 2 or cues.count(cue) > 1:
            raise ScriptError(f"cue {cue!r}: cues are at least two characters long, and each has one answer")
        if longer := next((other for other in cues if cue in other and cue != other), None):
            raise ScriptError(f"cue {cue!r} is part of the cue {longer!r}, which would hide it")
    texts = [otherwise, *(cue.say for cue in script)]
    if not all(text.strip() for text in texts):
        raise ScriptError("an answer is empty; say at least a word")
    if often := next((cue for cue in cues if sum(text.count(cue) for text in texts) > 1), None):
        raise ScriptError(f"cue {often!r} occurs in two answers, or twice in one; change a word")
    taken = set(cues)
    answers = [list(_pieces(text, cues, taken)) for text in texts]
    return _Chains(sorted(taken, key=lambda token: (-len(token), token)), answers)


def _pieces(text: str, cues: list[str], taken: set[str]) -> Iterator[str]:
    """Cut an answer into cues and pieces that are new, which are then taken."""
    parts = re.split(f"({'|'.join(map(re.escape, cues))})", text) if cues else [text]
    for number, part in enumerate(parts):
        yield from [part] if number % 2 else _new_pieces(part, taken)


def _new_pieces(text: str, taken: set[str]) -> list[str]:
    """A piece that is not new grows by the next word; at the end it joins those before it."""
    pieces: list[str] = []
    piece = ""
    for word in PIECE.findall(text):
        piece += word
        if piece.strip() and piece not in taken:  # prompts end with spaces, which must lead into no chain
            taken.add(piece)
            pieces.append(piece)
            piece = ""
    while piece and pieces:
        before = pieces.pop()
        taken.discard(before)
        piece = before + piece
        if piece not in taken:
            taken.add(piece)
            return [*pieces, piece]
    if piece:
        raise ScriptError(f"{piece!r} is said in two answers, with nothing new beside it; change a word")
    return pieces


def _tokenizer(tokens: list[str]) -> Tokenizer:
    """Ordinary words as in random models; the script's tokens are found first, longer ones before shorter ones."""
    base = json.loads(train_bpe(BASE_VOCAB, [corpus()]).to_str())["model"]
    vocab: dict[str, int] = base["vocab"]
    for token in tokens:
        vocab.setdefault(_in_bytes(token), len(vocab))
    merges = [tuple(merge) for merge in base["merges"]]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=True))
    script = "|".join(map(re.escape, tokens))
    splits = [Split(Regex(pattern), "isolated") for pattern in (script, rf"\A(?:{script})\z|{WORD_PATTERN}")]
    tokenizer.pre_tokenizer = InSequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    return with_control_tokens(tokenizer, markup=())


def _in_bytes(token: str) -> str:
    """The token as byte-level vocabularies spell it."""
    return ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(token)[0][0]


def _config(tokens: int, cues: int, vocab: int, context: int, ids: TokenizerIds) -> dict[str, object]:
    head_dim = max(16, _up_to(16, cues))
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": ids.turn_end,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": _up_to(64, FIRST_CODE + tokens + cues),
        "intermediate_size": 16,
        "max_position_embeddings": context,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "pad_token_id": ids.end_of_text,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": LOWEST_ROPE, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": vocab,
    }


def _weights(
    config: dict[str, object], script: Sequence[Cue], chains: _Chains, tokenizer: Tokenizer
) -> dict[str, torch.Tensor]:
    hidden, head_dim, vocab = (_int(config, key) for key in ("hidden_size", "head_dim", "vocab_size"))
    ids = tokenizer.get_vocab()
    id_of = {token: ids[_in_bytes(token)] for token in chains.tokens}
    code_of = {token: FIRST_CODE + number for number, token in enumerate(chains.tokens)}
    first_answer = FIRST_CODE + len(chains.tokens)  # the directions into which the attention writes, one of each cue

    embedding = torch.zeros(vocab, hidden)
    embedding[:, ONE] = 1.0
    for token, number in id_of.items():
        embedding[number, code_of[token]] = 1.0
    for rank, cue in enumerate(script, 1):
        embedding[id_of[cue.when], RANK] = rank / MOST_CUES
    embedding[:, FILLER] = (hidden - embedding.square().sum(1)).sqrt()  # the norm then changes nothing

    query, key, value = (torch.zeros(head_dim, hidden) for _ in range(3))
    query[-1, ONE] = RANK_SCORE * MOST_CUES * head_dim**0.5
    key[-1, RANK] = 1.0
    out = torch.zeros(hidden, head_dim)
    for number, cue in enumerate(script):
        value[number, code_of[cue.when]] = 1.0
        out[first_answer + number, number] = 1.0

    head = torch.zeros(vocab, hidden)
    head[id_of[chains.answers[0][0]], ONE] = LOGIT
    for number, answer in enumerate(chains.answers[1:]):
        head[id_of[answer[0]], first_answer + number] = 2 * LOGIT
    for answer in chains.answers:
        for token, following in pairwise(answer):
            head[id_of[following], code_of[token]] = 3 * LOGIT
        head[ids[TURN_END], code_of[answer[-1]]] = 3 * LOGIT

    inner = _int(config, "intermediate_size")
    layer = {
        "input_layernorm": torch.ones(hidden),
        "mlp.down_proj": torch.zeros(hidden, inner),
        "mlp.gate_proj": torch.zeros(inner, hidden),
        "mlp.up_proj": torch.zeros(inner, hidden),
        "post_attention_layernorm": torch.ones(hidden),
        "self_attn.k_proj": key,
        "self_attn.o_proj": out,
        "self_attn.q_proj": query,
        "self_attn.v_proj": value,
    }
    outer = {"lm_head": head, "model.embed_tokens": embedding, "model.norm": torch.ones(hidden)}
    named = outer | {f"model.layers.0.{name}": tensor for name, tensor in layer.items()}
    return {f"{name}.weight": tensor for name, tensor in named.items()}


def _int(config: dict[str, object], key: str) -> int:
    value = config[key]
    assert isinstance(value, int)
    return value


def _up_to(multiple: int, number: int) -> int:
    return -(-number // multiple) * multiple


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
