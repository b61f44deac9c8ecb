#!/usr/bin/env python3
"""Families that see, one line each: does Palestra compute what transformers computes of prompts with pictures?

    python tests/model/pictures_check.py                 # all of them; exit code 0 only if they pass
    python tests/model/pictures_check.py --families qwen3_vl

The models are those of `families_check.py`, with their towers. Compared in float32:

  tower     the features of pictures of several shapes, with what enters behind the first layers
  trainer   log-probabilities of the whole vocabulary at every position of packed sequences with and without pictures
  sampler   greedy tokens and their log-probabilities: groups, chunks that end inside a picture, a second turn that
            finds its first in the cache, and a cache so small that sequences are preempted
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import families_check as text

SEEING = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma4_vision", "gemma4_moe_vision")
SHAPES = ((2, 3), (5, 2), (4, 4), (1, 7))
"""Positions of the pictures, from top to bottom and from left to right."""
FEATURES = 1e-4
IMAGE = 500
"""The id of the token that stands for a picture's positions in what transformers reads."""
STRETCHES = ((7, 0, 21), (3, 1, 5, 2, 30), (0, 3, 9), (40,), (17, 2, 1, 2, 4))
"""Sequences: counts of tokens and numbers of pictures by turns."""
ADJACENT = ((3, 1, 0, 3, 5), (3, 1, 4))
"""More of them for families whose pictures look ahead: one has another picture right behind its first."""


@dataclass
class Seen:
    """A sequence with pictures."""

    tokens: list[int]
    """With IMAGE where pictures stand."""
    placed: list[tuple[int, int]]
    """First position and number of each picture."""


def make_pictures(multiple: int) -> list[Any]:
    from palestra.types import Picture

    rng = np.random.default_rng(7)
    found = []
    for down, right in SHAPES:
        height, width = down * multiple, right * multiple
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        found.append(Picture.of_pixels(pixels.tobytes(), height, width))
    return found


def make_sequences(*more: tuple[int, ...]) -> list[Seen]:
    rng, found = np.random.default_rng(1), []
    for stretches in (*STRETCHES, *more):
        seen = Seen([], [])
        for n, number in enumerate(stretches):
            if n % 2:
                down, right = SHAPES[number]
                seen.placed.append((len(seen.tokens), number))
                seen.tokens += [IMAGE] * (down * right)
            else:
                seen.tokens += rng.integers(3, IMAGE, number).tolist()
        found.append(seen)
    return found


class Check:
    def __init__(self, name: str, folder: Path, seed: int):
        self.truth = text.Reference.make(text.FAMILIES[name], folder, seed)
        self.truth.model.config.image_token_id = self.truth.model.model.config.image_token_id = IMAGE
        self.core = text.open_core(folder)
        self.tower = self.core.model.spec.tower
        self.sequences = make_sequences(*(ADJACENT if self.tower.looks_ahead else ()))
        self.pictures = make_pictures(self.tower.multiple)
        self.known: dict[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], Tensor] = {}
        """What transformers has computed: samples of a prompt mostly have the same tokens."""

    def patches(self, numbers: list[int]) -> dict[str, Tensor]:
        """What transformers' image processor makes of pictures that have the right size."""
        images = [
            np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)
            for picture in (self.pictures[n] for n in numbers)
        ]
        if self.is_gemma:
            return self.gemma_patches(images)
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor = Qwen2VLImageProcessorPil(
            patch_size=self.tower.patch,
            merge_size=self.tower.merge,
            temporal_patch_size=self.tower.frames,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
            do_resize=False,
        )
        return dict(processor(images, return_tensors="pt"))

    @property
    def is_gemma(self) -> bool:
        return self.core.model.spec.family == "gemma4"

    def gemma_patches(self, images: list[np.ndarray]) -> dict[str, Tensor]:
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        processor = Gemma4ImageProcessorPil(
            patch_size=self.tower.patch, pooling_kernel_size=self.tower.pool, max_soft_tokens=70, do_resize=False
        )
        made = dict(processor(images, return_tensors="pt"))
        del made["num_soft_tokens_per_image"]
        return made

    def logprobs(self, tokens: list[int], placed: list[tuple[int, int]]) -> Tensor:
        key = tuple(tokens), tuple(placed)
        if key not in self.known:
            self.known[key] = self.computed(tokens, placed)
        return self.known[key]

    @torch.no_grad()
    def computed(self, tokens: list[int], placed: list[tuple[int, int]]) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens]), "use_cache": False}
        if placed:
            inputs |= self.patches([number for _, number in placed])
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
        if not self.is_gemma:
            self.truth.model.model.rope_deltas = None
        return torch.log_softmax(self.truth.model(**inputs).logits[0].float(), -1)

    def features(self) -> float:
        """The largest difference of a feature."""
        worst = 0.0
        for n, picture in enumerate(self.pictures):
            inputs = self.patches([n])
            with torch.no_grad():
                theirs = self.theirs(inputs)
            ours = self.core.model.decoder.vision.of(picture)
            pairs = [(ours.rows, theirs.pooler_output[0] if self.is_gemma else theirs.pooler_output)]
            deepstack = getattr(theirs, "deepstack_features", None) or []
            pairs += zip(ours.deepstack, deepstack, strict=True)
            for mine, truth in pairs:
                off = (mine - truth).abs().max().item()
                if mine.shape != truth.shape or not off <= FEATURES:
                    raise text.Mismatch(f"tower: a feature of a picture of {SHAPES[n]} is off by {off:.1e}")
                worst = max(worst, off)
        return worst

    def theirs(self, inputs: dict[str, Tensor]) -> Any:
        if self.is_gemma:
            return self.truth.model.model.get_image_features(**inputs)
        return self.truth.model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])

    def trainer(self) -> float:
        """The largest difference of a log-probability."""
        from palestra.model import TrainItem, encode
        from palestra.types import Datum, ImageChunk, TextChunk

        everything, items, sequences = np.arange(text.VOCAB), [], self.sequences
        for seen in sequences:
            chunks: list[Any] = []
            at = 0
            for start, number in seen.placed:
                chunks += [TextChunk(tuple(seen.tokens[at:start])), ImageChunk(self.pictures[number].digest)]
                at = start + np.prod(SHAPES[number])
            chunks.append(TextChunk(tuple(seen.tokens[at:])))
            targets = np.tile(everything, (len(seen.tokens), 1))
            weights = np.ones(targets.shape, np.float32)
            weights[:-1][np.array(seen.tokens[1:]) == IMAGE] = 0
            inputs = {"target_tokens": encode(targets), "weights": encode(weights)}
            pictures = {picture.digest: picture for picture in self.pictures}
            items.append(TrainItem(None, Datum(chunks=tuple(chunks), loss_inputs=inputs), pictures=pictures))
        worst = 0.0
        for seen, result in zip(sequences, self.core.trainer.forward(items), strict=True):
            off = (torch.from_numpy(result.logprobs) - self.logprobs(seen.tokens, seen.placed)).abs()
            if not off.max() <= text.allowed(self.truth):
                row = int((off.max(-1).values > text.allowed(self.truth)).nonzero()[0])
                raise text.Mismatch(f"trainer: {seen.placed} is off by {off.max():.1e}, from position {row} on")
            worst = max(worst, off.max().item())
        return worst

    def sampler(self) -> tuple[int, float]:
        """How many greedy tokens agreed, and the largest difference of their log-probabilities."""
        prompts, count, worst = self.sequences, 0, 0.0
        roomy = text.make_sampler(self.core, page_size=4, prefill_tokens=10, cache_tokens=2048)
        first = self.greedy(roomy, prompts, samples=3)
        second = [
            Seen(prompt.tokens + answers[0][0] + [11, 12, 13], prompt.placed)
            for prompt, answers in zip(prompts, first, strict=True)
        ]
        tight = text.make_sampler(self.core, page_size=4, prefill_tokens=9, cache_tokens=120)
        runs = [
            ("sampler", prompts, first),
            ("sampler, second turn", second, self.greedy(roomy, second, samples=2)),
            ("sampler, small cache", prompts, self.greedy(tight, prompts, samples=2)),
        ]
        if not tight.scheduler.preemptions:
            raise text.Mismatch("the small cache preempted nobody")
        for what, asked, answered in runs:
            for prompt, answers in zip(asked, answered, strict=True):
                for tokens, logprobs in answers:
                    off = self.judge(what, prompt, tokens, logprobs)
                    count, worst = count + len(tokens), max(worst, off)
        return count, worst

    def judge(self, what: str, prompt: Seen, tokens: list[int], logprobs: list[float]) -> float:
        """The largest difference of a log-probability."""
        expected = self.logprobs(prompt.tokens + tokens[:-1], prompt.placed)[len(prompt.tokens) - 1 :]
        for n, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            if expected[n].max() - expected[n, token] > text.TIE:
                raise text.Mismatch(f"{what}: token {n} behind {prompt.placed} is not the likeliest one")
            if not abs(logprob - expected[n, token].item()) <= text.allowed(self.truth):
                raise text.Mismatch(f"{what}: log-probability of token {n} behind {prompt.placed} is off")
        return np.abs(np.array(logprobs) - expected[range(len(tokens)), tokens].numpy()).max().item()

    def greedy(self, sampler: Any, prompts: list[Seen], samples: int) -> list[list[tuple[list[int], list[float]]]]:
        from palestra.types import PlacedImage, SampleRequest, SamplingParams

        params = SamplingParams(temperature=0, max_tokens=text.NEW_TOKENS, stop_token_ids=(), seed=0)
        requests = [
            SampleRequest(
                prompt=tuple(prompt.tokens),
                images=tuple(PlacedImage(start, self.pictures[number].digest) for start, number in prompt.placed),
                pictures=tuple(self.pictures[number] for number in {number for _, number in prompt.placed}),
                num_samples=samples,
                params=params,
                raw_logprobs=True,
            )
            for prompt in prompts
        ]
        return [[(s.tokens, s.raw_logprobs) for s in r.sequences] for r in sampler.generate(requests)]


def check(name: str, *, seed: int) -> tuple[str, str]:
    """A verdict, and what there is to say about it."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            found = Check(name, Path(scratch) / "model", seed)
            features, trained = found.features(), found.trainer()
            count, sampled = found.sampler()
        except text.Mismatch as e:
            return "FAIL", text.one_line(e)
    notes = f"features {features:.1e}, log-probabilities {trained:.1e}, {count} greedy tokens, theirs {sampled:.1e}"
    return "ok", notes


def main() -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    warnings.filterwarnings("ignore")
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--families", help="names, separated by commas; without it all of them")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    torch.set_num_threads(1)
    names = args.families.split(",") if args.families else SEEING
    verdicts = []
    for name in names:
        verdict, notes = check(name, seed=args.seed)
        verdicts.append(verdict == "ok")
        print(f"{name:<18} {verdict:<6} {notes}", flush=True)
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
