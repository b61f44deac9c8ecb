"""Answers what a request asks about its own prompt: log-probabilities, likeliest tokens, chosen tokens, draws.

Row i comes from the hidden state at position i and speaks about prompt token i + 1. After a preemption rows may come
again: they overwrite themselves. All log-probabilities are the unscaled model's.

Owns: scoring a prompt. Never touches: scheduling, the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.model.draw_noise import uniform_grid
from palestra.model.errors import DataError
from palestra.model.sampling.token_draws import draw_many
from palestra.model.training.log_softmax import log_softmax
from palestra.model.training.prepared import encode
from palestra.model.vision.placed import PlacedPictures
from palestra.types import SampleRequest, SampleResult, TensorData, TopLogprobs

ALT_COPIES = 4  # a draw holds the logits' rows a few times over, once in double


@dataclass(slots=True, frozen=True)
class TargetCells:
    """The cells of `target_prompt_logprobs`, in the order of their values."""

    rows: NDArray[np.int64]
    """Ascending."""
    ids: NDArray[np.int64]
    """-1: nothing is asked."""

    @classmethod
    def of(cls, tensor: TensorData, n_rows: int, vocab_size: int) -> TargetCells:
        """Raises DataError unless it is an int64 [n_rows, K] with ids of the vocabulary."""
        name = "target_prompt_logprobs"
        if tensor.dtype != "int64":
            raise DataError(f"{name}: dtype must be int64, found {tensor.dtype}")
        if len(tensor.shape) != 2 or tensor.shape[0] != n_rows or tensor.shape[1] < 0:
            raise DataError(
                f"{name} has shape {list(tensor.shape)}; it must be [{n_rows}, K]: a row per prompt token but the first"
            )
        try:
            ids = np.frombuffer(tensor.data, "<i8")
            counts = _row_lengths(tensor, len(ids))
        except ValueError as e:  # or bytes that are no whole numbers of 8
            raise DataError(f"{name}: data and indices do not fill shape {list(tensor.shape)} ({e})") from None
        if not len(ids) or ids.max() < 0:
            raise DataError(f"{name} names no token; leave it out, or give at least one id")
        if ids.min() < -1 or ids.max() >= vocab_size:
            raise DataError(f"{name}: ids must be -1 (skip) or in the vocabulary of {vocab_size}")
        return cls(np.repeat(np.arange(n_rows), counts), ids)

    @property
    def first_row(self) -> int:
        return int(self.rows[np.argmax(self.ids >= 0)])


class PromptScores:
    def __init__(self, request: SampleRequest, seed: int, vocab_size: int, pictures: PlacedPictures | None = None):
        self.prompt, self.n_rows = request.prompt, len(request.prompt) - 1
        self.request, self.seed, self.pictures = request, seed, pictures
        wants_logprobs = request.prompt_logprobs or request.topk_prompt_logprobs > 0
        last_n, k = request.prompt_logprobs_last_n, request.prompt_alt_tokens_k
        self._logprobs_from = (self.n_rows - last_n if last_n else 0) if wants_logprobs else self.n_rows
        self._logprobs: list[float | None] = [None] * len(self.prompt)
        self._top: list[TopLogprobs | None] = [None] * len(self.prompt)
        targets = request.target_prompt_logprobs
        self._cells = None if targets is None else TargetCells.of(targets, self.n_rows, vocab_size)
        ids = np.zeros(0, np.int64) if self._cells is None else self._cells.ids
        self._cell_logprobs = np.where(ids < 0, 0.0, np.nan).astype(np.float32)
        self._alt_ids = np.full((self.n_rows, k), -1, np.int64)
        self._alt_logprobs = np.full((self.n_rows, k), np.nan, np.float32)

    @classmethod
    def of(
        cls, request: SampleRequest, seed: int, vocab_size: int, pictures: PlacedPictures | None = None
    ) -> PromptScores | None:
        """Makes the scorer of a request. None when it asks for none."""
        wants_logprobs = request.prompt_logprobs or request.topk_prompt_logprobs or request.prompt_alt_tokens_k
        return (
            cls(request, seed, vocab_size, pictures)
            if wants_logprobs or request.target_prompt_logprobs is not None
            else None
        )

    @property
    def first_row(self) -> int:
        """The position from which on the prompt must be computed."""
        cells_from = self.n_rows if self._cells is None else self._cells.first_row
        return min(self._logprobs_from, cells_from, 0 if self.request.prompt_alt_tokens_k else self.n_rows)

    def read(self, start: int, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], max_rows: int) -> None:
        """Hidden states from row `start` on, `max_rows` of logits at a time."""
        size = max(1, max_rows // ALT_COPIES) if self.request.prompt_alt_tokens_k else max_rows
        end = min(start + len(hidden), self.n_rows)
        for low in range(max(start, self.first_row), end, size):
            high = min(low + size, end)
            logits = logits_of(hidden[low - start : high - start])
            logp = log_softmax(logits)
            first = max(low, self._logprobs_from)
            if first < high:
                self._keep_logprobs(first, logp[first - low :])
            if self._cells is not None:
                self._keep_targets(self._cells, low, logp)
            if self.request.prompt_alt_tokens_k:
                self._keep_draws(low, logits, logp)

    def write_to(self, result: SampleResult) -> None:
        request, targets = self.request, self.request.target_prompt_logprobs
        if self.pictures is not None:  # nothing predicts the rows of a picture; clients multiply by weights of 0
            for start, count in zip(self.pictures.starts, self.pictures.counts, strict=True):
                self._top[start : start + count] = [None] * count
                for place in range(max(start, self._logprobs_from + 1), start + count):
                    self._logprobs[place] = 0.0
        if request.prompt_logprobs:
            result.prompt_logprobs = self._logprobs
        if request.topk_prompt_logprobs:
            result.topk_prompt_logprobs = self._top
        if targets is not None:
            values = self._cell_logprobs.astype("<f4", copy=False).tobytes()
            result.target_prompt_logprobs = msgspec.structs.replace(targets, data=values, dtype="float32")
        if request.prompt_alt_tokens_k:
            result.prompt_alt_tokens = encode(self._alt_ids)
            result.prompt_alt_logprobs = encode(self._alt_logprobs)

    def _keep_logprobs(self, first: int, logp: Tensor) -> None:
        tokens = slice(first + 1, first + 1 + len(logp))
        actual = torch.tensor(self.prompt[tokens], device=logp.device)
        self._logprobs[tokens] = logp.gather(1, actual[:, None]).squeeze(1).tolist()
        if self.request.topk_prompt_logprobs:
            values, ids = logp.topk(self.request.topk_prompt_logprobs, -1)
            self._top[tokens] = [
                TopLogprobs(tuple(i), tuple(v)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)
            ]

    def _keep_targets(self, cells: TargetCells, first: int, logp: Tensor) -> None:
        low, high = np.searchsorted(cells.rows, [first, first + len(logp)])
        rows = torch.from_numpy(cells.rows[low:high] - first).to(logp.device)
        ids = torch.tensor(cells.ids[low:high], device=logp.device)
        values = torch.where(ids < 0, 0.0, logp[rows, ids.clamp_min(0)])
        self._cell_logprobs[low:high] = values.cpu().numpy()

    def _keep_draws(self, first: int, logits: Tensor, logp: Tensor) -> None:
        rows = slice(first, first + len(logp))
        u = uniform_grid(self.seed, rows.start, rows.stop, self.request.prompt_alt_tokens_k).to(logits.device)
        ids = draw_many(logits.float(), self.request.params.temperature, u)
        self._alt_ids[rows] = ids.cpu().numpy()
        self._alt_logprobs[rows] = logp.gather(1, ids).cpu().numpy()


def _row_lengths(tensor: TensorData, n_values: int) -> NDArray[np.int64]:
    """Cells listed in each row; ValueError if values, indices and shape do not go together."""
    n_rows, width = tensor.shape
    if tensor.crow_indices is None and tensor.col_indices is None:
        if n_values != n_rows * width:
            raise ValueError(f"{n_values} values")
        return np.full(n_rows, width)
    ends, columns = (np.frombuffer(x or b"", "<i8") for x in (tensor.crow_indices, tensor.col_indices))
    counts = np.diff(ends)
    sound = len(ends) == n_rows + 1 and ends[0] == 0 and ends[-1] == n_values == len(columns) and (counts >= 0).all()
    if not sound or (columns < 0).any() or (columns >= width).any():
        raise ValueError("sparse rows that do not add up")
    return counts
