"""Whether an exported checkpoint says in transformers what the checkpoint says here."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct

from palestra.checkpoints import CheckpointError
from palestra.checkpoints.gguf import ADAPTER_FILE, MODEL_FILE
from palestra.model import AdapterPool, Trainer, TrainItem, encode, load_model
from palestra.model.loading.weight_files import WeightFiles
from palestra.model.lora.adapter_files import load_adapter
from palestra.runs.export_form import ExportForm
from palestra.types import Datum

N_TOKENS = 64


EXACT, ROUNDED = 1e-4, 0.05
"""Mean differences in nats that are allowed in float32, and where merged weights are rounded to 16 bits."""
EIGHT_BITS, FEWER_BITS = 0.1, 0.5
"""The same for matrices of a GGUF file."""


class ExportCheck(Struct, frozen=True, kw_only=True):
    mean_difference: float
    """Mean difference of a token's log-probability, in nats, both computed in float32."""
    largest_difference: float
    allowed: float
    """Mean difference that is allowed: more where merged weights were rounded to 16 bits."""
    change: float
    """Mean difference between the checkpoint and its base: how much there is to get wrong."""
    warnings: list[str]
    """Warnings of the libraries that loaded the export."""

    @property
    def is_good(self) -> bool:
        return self.mean_difference < self.allowed


def check_export(out: Path, form: ExportForm, adapter: Path, base: Path) -> ExportCheck:
    """Needs transformers, and PEFT for its form. Raises CheckpointError for a form that neither reads."""
    if (out / ADAPTER_FILE).is_file():
        raise CheckpointError("transformers reads no adapters of GGUF: check the whole model, with --as gguf")
    model = load_model(base, dtype="float32")
    pool = AdapterPool(model.spec)
    trainer = Trainer(model.decoder, pool)
    tokens = np.random.default_rng(0).integers(0, model.spec.vocab_size, N_TOKENS + 1)
    datum = Datum.of_tokens(tokens[:-1].tolist(), target_tokens=encode(tokens[1:]))
    ours, plain = (
        torch.from_numpy(result.logprobs)
        for result in trainer.forward([TrainItem(load_adapter(pool, adapter), datum), TrainItem(None, datum)])
    )
    with _heard() as warned:
        loaded = _load_elsewhere(out, form, base)
    theirs = _logprobs(loaded, torch.from_numpy(tokens))
    difference = (ours - theirs).abs()
    return ExportCheck(
        mean_difference=float(difference.mean()),
        largest_difference=float(difference.max()),
        allowed=_allowed(out, form),
        change=float((ours - plain).abs().mean()),
        warnings=sorted(set(warned)),
    )


@contextmanager
def _heard() -> Iterator[list[str]]:
    """Collects what PEFT and transformers warn of, as warnings or in their logs."""
    warned: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.append(record.getMessage())

    ear, loggers = Ear(logging.WARNING), [logging.getLogger(name) for name in ("peft", "transformers")]
    for logger in loggers:
        logger.addHandler(ear)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            yield warned
        warned += [str(one.message) for one in heard if issubclass(one.category, UserWarning | RuntimeWarning)]
    finally:
        for logger in loggers:
            logger.removeHandler(ear)


def _allowed(out: Path, form: ExportForm) -> float:
    if (out / MODEL_FILE).is_file():
        from gguf import GGUFReader

        kinds = {tensor.tensor_type.name for tensor in GGUFReader(out / MODEL_FILE).tensors}
        kinds -= {"F32"}
        sixteen = {"F16", "BF16"}
        if kinds <= sixteen:
            return ROUNDED if kinds else EXACT
        return EIGHT_BITS if kinds <= sixteen | {"Q8_0"} else FEWER_BITS
    if form == "peft":
        return EXACT
    with WeightFiles(out) as files:
        if any(files.packing(name) is not None for name in files):
            return FEWER_BITS
        return ROUNDED if any(files.tensor(name).dtype != torch.float32 for name in files) else EXACT


def _load_elsewhere(out: Path, form: ExportForm, base: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_log

    transformers_log.disable_progress_bar()
    if (out / MODEL_FILE).is_file():
        return _load_gguf(out, base)
    try:
        model = AutoModelForCausalLM.from_pretrained(out if form == "merged" else base, dtype=torch.float32)
    except ImportError as error:  # weights of 4 bits are read by bitsandbytes
        raise CheckpointError(f"{out} is written, but transformers cannot check it: {error}") from None
    if form == "merged":
        return model if hasattr(model, "hf_quantizer") else model.float()  # weights of 8 bits become bfloat16
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(out))


def _load_gguf(out: Path, base: Path) -> torch.nn.Module:
    """Loads the file with the base's config, since transformers does not read all that the file says of the model's
    shape."""
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    config = AutoConfig.from_pretrained(base).get_text_config()
    if config.model_type == "mistral":  # which the format calls llama
        fields = config.to_dict()
        config = LlamaConfig(**{name: fields[name] for name in fields.keys() - {"model_type", "architectures"}})
    config.tie_word_embeddings = all(t.name != "output.weight" for t in GGUFReader(out / MODEL_FILE).tensors)
    unread = f"{out / MODEL_FILE} is written, but transformers cannot check it: "
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            out, gguf_file=MODEL_FILE, config=config, dtype=torch.float32, output_loading_info=True
        )
    except (NotImplementedError, TypeError, ValueError) as error:
        raise CheckpointError(f"{unread}{error}") from None
    model, info = found
    if info["missing_keys"]:
        raise CheckpointError(f"{unread}it does not read {', '.join(sorted(info['missing_keys']))}")
    return model


def _logprobs(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(tokens[None, :-1]).logits[0]
    return logits.float().log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
