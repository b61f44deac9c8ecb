"""How fast prompts with pictures are sampled, beside transformers' `generate` on the same weights.

    python benchmarks/vision.py --quick
    python benchmarks/vision.py --device cuda --shape qwen3-vl-4b

Each prompt has one picture of 1,024 x 1,024 pixels and 16 samples; every run has pictures that were never seen. Beside
the rate it says how often the tower ran, and the memory at its peak beside prompts of as many tokens without pictures.

The weights are random, in the published shape, in a folder that both sides read. It needs torch, transformers, msgspec,
llguidance and Pillow.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the models are local: nothing may wait for the network

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Measure, Progress, Report, Row, alternate, argument_parser, machine, report, versions
from torch import Tensor

from palestra.model import AdapterPool, Sampler, load_model
from palestra.model.loading.qwen_tower_spec import QwenTowerSpec
from palestra.testing.random_model import make_random_model
from palestra.types import Picture, PlacedImage, SampleRequest, SamplingParams

PACKAGES = ("palestra", "torch", "transformers")
SAMPLES, TEXT = 16, 32  # for each prompt; tokens before and behind its picture
TARGET = 4.0


@dataclass(frozen=True, slots=True)
class Case:
    base: str
    """Shape of the text model."""
    prompts: int
    answer: int
    """Tokens of each sample."""
    side: int
    """Of a picture, in pixels."""
    batches: tuple[int, ...]
    """Prompts in a call of the peer: its pilot tries all of them."""
    overrides: dict[str, Any] = field(default_factory=dict)


QWEN3_VL_4B = {
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
    }
}
CASES = {
    "tiny": Case("tiny", 2, 32, 256, (1, 2)),
    "qwen3-vl-4b": Case("qwen3-4b", 16, 128, 1024, (1, 4, 16), QWEN3_VL_4B),
}


class Prompts:
    """New pictures and tokens at each call; the pictures' places are the same."""

    def __init__(self, case: Case, tower: QwenTowerSpec, vocab: int):
        self.case, self.tower, self.vocab = case, tower, vocab
        self.rows = (case.side // tower.multiple) ** 2
        self._rng = np.random.default_rng(0)

    def draw(self) -> list[tuple[list[int], Picture]]:
        return [(self.tokens(), self.picture()) for _ in range(self.case.prompts)]

    def tokens(self) -> list[int]:
        tower, before, behind = self.tower, *(self._text(TEXT) for _ in range(2))
        return [*before, tower.start_token, *[tower.image_token] * self.rows, tower.end_token, *behind]

    def text(self) -> list[int]:
        """As many tokens without a picture."""
        return self._text(2 * TEXT + 2 + self.rows)

    def picture(self) -> Picture:
        """Coarse squares: noise would take long to pack."""
        side = self.case.side
        squares = self._rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        pixels = squares.repeat(side // 16, 0).repeat(side // 16, 1)
        return Picture.of_pixels(pixels.tobytes(), side, side)

    def _text(self, n: int) -> list[int]:
        specials = {self.tower.image_token, self.tower.start_token, self.tower.end_token}
        drawn = self._rng.integers(3, self.vocab, n).tolist()
        return [token if token not in specials else 3 for token in drawn]


class OursSide:
    def __init__(self, folder: Path, device: str, dtype: str, case: Case):
        self.model = load_model(folder, device=device, dtype=dtype)
        self.pool = AdapterPool(self.model.spec, dtype=self.model.decoder.dtype, device=self.model.decoder.device)
        self.case, vision = case, self.model.decoder.vision
        assert vision is not None
        self.vision = vision

    def sampler(self, longest: int) -> Sampler:
        case, on_gpu = self.case, self.model.decoder.device.type == "cuda"
        tokens = case.prompts * (longest + SAMPLES * (case.answer + 32))
        return Sampler(
            self.model.decoder,
            self.pool,
            cache_tokens=tokens,
            max_rows=512 if on_gpu else 64,
            prefill_tokens=8192 if on_gpu else 2048,
        )

    def run(self, sampler: Sampler, prompts: list[tuple[list[int], Picture | None]]) -> None:
        params = SamplingParams(max_tokens=self.case.answer, stop_token_ids=(), seed=1)
        requests = []
        for tokens, picture in prompts:
            images = () if picture is None else (PlacedImage(TEXT + 1, picture.digest),)
            pictures = () if picture is None else (picture,)
            requests.append(
                SampleRequest(
                    prompt=tuple(tokens), images=images, pictures=pictures, num_samples=SAMPLES, params=params
                )
            )
        made = sum(len(s.tokens) for r in sampler.generate(requests) for s in r.sequences)
        assert made == len(prompts) * SAMPLES * self.case.answer


class TheirSide:
    def __init__(self, folder: Path, device: str, dtype: str, tower: QwenTowerSpec):
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        loaded: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype))
        loaded.generation_config = transformers.GenerationConfig(pad_token_id=0)
        self.model, self.tower = loaded.to(device).eval(), tower
        self.config = transformers.GenerationConfig

    @torch.inference_mode()
    def run(self, prompts: list[tuple[list[int], Picture]], batch: int, answer: int) -> None:
        device = self.model.device
        config = self.config(
            do_sample=True,
            top_k=0,
            max_new_tokens=answer,
            min_new_tokens=answer,
            num_return_sequences=SAMPLES,
            pad_token_id=0,
        )
        for start in range(0, len(prompts), batch):
            some = prompts[start : start + batch]
            ids = torch.tensor([tokens for tokens, _ in some], device=device)
            patches = torch.cat([self.patches(picture) for _, picture in some]).to(device, self.model.dtype)
            side = some[0][1].height // self.tower.patch
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": patches}
            inputs["image_grid_thw"] = torch.tensor([[1, side, side]] * len(some), device=device)
            if "mm_token_type_ids" in signature(self.model.forward).parameters:  # not in older versions
                inputs["mm_token_type_ids"] = (ids == self.tower.image_token).int()
            out = self.model.generate(**inputs, generation_config=config)
            assert out.shape == (len(some) * SAMPLES, ids.shape[1] + answer)

    def patches(self, picture: Picture) -> Tensor:
        """The patches of a picture as the family's image processor lays them out."""
        tower, n = self.tower, picture.height // self.tower.multiple
        pixels = np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)
        squares = torch.from_numpy(pixels / np.float32(127.5) - np.float32(1)).float()
        squares = squares.view(n, tower.merge, tower.patch, n, tower.merge, tower.patch, 3)
        squares = squares.permute(0, 3, 1, 4, 6, 2, 5).flatten(0, 3)
        return squares[:, :, None].expand(-1, -1, tower.frames, -1, -1).flatten(1)


def timed(work: Callable[[], None], tokens: int, device: str) -> float:
    _wait(device)
    begin = time.perf_counter()
    work()
    _wait(device)
    return tokens / (time.perf_counter() - begin)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(work: Callable[[], object], device: str) -> int:
    """The most memory while this runs."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        work()
        _wait(device)
        return torch.cuda.max_memory_allocated()
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if sys.platform != "linux" else _peak_rss()


def _peak_rss() -> int:
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def compare(shape: str, case: Case, options: Any, folder: Path, progress: Progress) -> Report:
    device, dtype = options.device, options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    progress.say(f"{shape}: writing random weights")
    make_random_model(folder, family="qwen3_vl", shape=case.base, dtype=dtype, overrides=case.overrides)
    ours = OursSide(folder, device, dtype, case)
    tower = ours.model.spec.tower
    assert isinstance(tower, QwenTowerSpec)
    prompts = Prompts(case, tower, ours.model.spec.vocab_size)
    length, tokens = len(prompts.tokens()), case.prompts * SAMPLES * case.answer
    sampler, runs = ours.sampler(length), [0]
    what = f"{shape}, {case.prompts} prompts of {length} tokens with a picture, {SAMPLES} x {case.answer}"

    def seeing() -> float:
        drawn: list[Any] = prompts.draw()
        runs[0] += 1
        return timed(lambda: ours.run(sampler, drawn), tokens, device)

    def blind() -> float:
        drawn: list[Any] = [(prompts.text(), None) for _ in range(case.prompts)]
        return timed(lambda: ours.run(sampler, drawn), tokens, device)

    progress.say(f"{shape}: warming up, ours")
    peaks = {}
    for name, work in (("text", blind), ("pictures", seeing)):
        work()
        peaks[name] = peak_bytes(work, device)
    theirs = TheirSide(folder, device, dtype, tower)
    pilots: dict[int, float] = {}

    def peer(batch: int) -> float:
        drawn = prompts.draw()
        return timed(lambda: theirs.run(drawn, batch, case.answer), tokens, device)

    for batch in case.batches:
        progress.say(f"{shape}: pilot, generate with {batch * SAMPLES} sequences")
        try:
            peer(batch)
            pilots[batch] = peer(batch)
        except torch.cuda.OutOfMemoryError:
            progress.say(f"{shape}: {batch * SAMPLES} sequences do not fit")
            torch.cuda.empty_cache()
    best = max(pilots, key=pilots.__getitem__)
    rounds = options.rounds or (2 if options.quick else 5)
    measured = alternate({"ours": seeing, "peer": lambda: peer(best), "text": blind}, rounds=rounds)
    name = f"transformers generate, {best * SAMPLES} sequences"
    target = TARGET if device == "cuda" else None
    computed = ours.vision.computed / (runs[0] * case.prompts)
    peak, plain = (Measure((peaks[one] / 1e9,)) for one in ("pictures", "text"))
    rows = [
        Row(f"{what} tokens", "tok/s", measured["ours"], name, measured["peer"], target_ratio=target),
        Row("the same beside text alone", "tok/s", measured["ours"], "ours, text", measured["text"]),
        Row("runs of the tower for a picture", "runs", Measure((computed,)), target_value=1.0, less_is_better=True),
        Row("memory at its peak", "GB", peak, "ours, text", plain, less_is_better=True),
    ]
    return Report("vision", machine(), versions(PACKAGES), rows, [f"{dtype} on {device}, random weights"])


def main() -> int:
    parser = argument_parser("vision", "Prompts with pictures, sampled beside transformers' generate.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="float32 on the CPU, bfloat16 on a GPU")
    parser.add_argument("--shape", choices=tuple(CASES), help="tiny on the CPU, qwen3-vl-4b on a GPU")
    options = parser.parse_args()
    shape = options.shape or ("qwen3-vl-4b" if options.device == "cuda" else "tiny")
    case, progress = CASES[shape], Progress()
    if options.quick:
        case = Case(case.base, 2, 16, case.side, case.batches[:2], case.overrides)
    with tempfile.TemporaryDirectory(prefix="palestra-vision-") as scratch:
        found = compare(shape, case, options, Path(scratch) / "model", progress)
    progress.done()
    report(found, json_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
