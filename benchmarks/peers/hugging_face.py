"""Times transformers' `generate` and its continuous batching, each with the settings of the benchmark."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the models are local: nothing may wait for the network

import contextlib
import itertools
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from peers.workloads import Generate, SampleWork
from transformers import AutoModelForCausalLM, GenerationConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # failures are told once, by the pilot
warnings.filterwarnings("ignore", module=r"(transformers|peft)\b")

Order = Literal["prompt", "output"]

PAD = 0
PAGE = 16  # of continuous batching on the CPU; 32 to 256 were slower
WAIT_S = 600  # for one result of continuous batching; longer means it hangs


@dataclass(frozen=True, slots=True)
class GenerateSetup:
    """`generate` takes one length for a whole batch: rows run to the longest wanted, only wanted tokens count."""

    attention: str = "sdpa"
    batch: int = 16
    """Sequences, samples of one prompt included."""
    order: Order = "prompt"
    """What batches are sorted by. "output" needs lengths that are not known before sampling: the peer's best case."""

    def __str__(self) -> str:
        oracle = ", sorted by output length" if self.order == "output" else ""
        return f"generate, {self.attention}, batch {self.batch}{oracle}"


@dataclass(frozen=True, slots=True)
class ContinuousSetup:
    """On the CPU attention is dense over everything in the batch, so fewer requests at a time can be faster."""

    max_requests: int
    max_batch_tokens: int | None
    """None: as the library finds fit (on a GPU; on the CPU it would take all memory)."""
    flash: bool = False

    def __str__(self) -> str:
        return f"continuous batching, {'flash' if self.flash else 'sdpa'}, {self.max_requests} requests"


def load(folder: Path, *, attention: str, dtype: str, device: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    # Fields left at None are filled from here: without this the model's end-of-sequence ids would stop rows early.
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    return model.to(device).eval()


def generate_with(model: Any, work: SampleWork, setup: GenerateSetup) -> Generate:
    lengths = work.output_lengths if setup.order == "output" else work.prompt_lengths
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    copies = min(work.samples, setup.batch)
    jobs = [i for i in order for _ in range(work.samples // copies)]
    size = max(1, setup.batch // copies)
    batches = [jobs[start : start + size] for start in range(0, len(jobs), size)]
    device = model.device

    @torch.inference_mode()
    def generate(prompts: list[list[int]]) -> int:
        made = 0
        for batch in batches:
            ids, mask = _left_padded([prompts[i] for i in batch])
            wanted = [work.output_lengths[i] for i in batch]
            config = _sampling(max_new_tokens=max(wanted), num_return_sequences=copies)
            out = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=config)
            drawn = out[:, ids.shape[1] :].tolist()
            made += sum(len(row[: wanted[n // copies]]) for n, row in enumerate(drawn))
        return made

    return generate


class Continuous:
    """A manager of continuous batching; several samples of a prompt are forks of one prefill, and blocks are shared."""

    def __init__(self, model: Any, work: SampleWork, setup: ContinuousSetup):
        from transformers import ContinuousBatchingConfig

        settings: dict[str, Any] = {"max_requests_per_batch": setup.max_requests}
        if "auto_switch_to_flash" in signature(ContinuousBatchingConfig).parameters:  # not before transformers 5.18
            settings["auto_switch_to_flash"] = setup.flash
        if setup.max_batch_tokens is None:
            settings |= {"max_memory_percent": 0.3}  # others work on the same GPU; far more than the workloads need
        else:
            pages = (-(-work.longest // PAGE) + 1) * (len(work.prompt_lengths) * work.samples + 1)
            settings |= {"page_size": PAGE, "num_blocks": pages, "max_batch_tokens": setup.max_batch_tokens}
        self.model, self.work = model, work
        self.manager = model.init_continuous_batching(
            generation_config=_sampling(num_return_sequences=work.samples, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=True, **settings),
        )
        self._ids = itertools.count()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Its thread, started and warm. On the CPU it ends with each run: the OpenMP threads it keeps would change how
        long everybody else's wait for each other."""
        if not self.manager.is_running():
            self.manager.start()
            self._run([[1, 2]], [4])  # of length 1 it fails: forks that are over at once leave it an empty batch
        try:
            yield
        finally:
            if self.model.device.type == "cpu":
                self.manager.stop(block=True, timeout=30, keep_for_next_session=True)

    def generate(self, prompts: list[list[int]]) -> int:
        return self._run(prompts, self.work.output_lengths)

    def close(self) -> None:
        if self.manager.is_running():
            self.manager.stop(block=True, timeout=30, hard_stop=True)
        self.model.destroy_cached_continuous_batching_manager()

    def _run(self, prompts: list[list[int]], lengths: Sequence[int]) -> int:
        for prompt, n in zip(prompts, lengths, strict=True):
            self.manager.add_request(prompt, request_id=str(next(self._ids)), max_new_tokens=n, eos_token_id=-1)
        results = [_next_result(self.manager) for _ in range(len(prompts) * self.work.samples)]
        return sum(len(r.generated_tokens) for r in results)


def _next_result(manager: Any) -> Any:
    for _ in range(WAIT_S):
        result = manager.get_result(timeout=1)
        if result is not None and result.error is not None:
            raise RuntimeError(str(result.error).strip().splitlines()[-1])
        if result is not None and result.is_finished():
            return result
        if not manager.is_running():
            raise RuntimeError("its thread ended")
    raise TimeoutError(f"no result in {WAIT_S} s")


def _sampling(**more: Any) -> GenerationConfig:
    """The plain distribution at temperature 1, as ours."""
    return GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=PAD, **more)


def _left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), PAD)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask
