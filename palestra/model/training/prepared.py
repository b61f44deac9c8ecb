"""Data as they are trained on: checked, and as arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from palestra.model.errors import DataError
from palestra.model.loading.spec import ModelSpec
from palestra.model.lora.adapters import Adapter
from palestra.model.training.losses import Loss, loss_named
from palestra.model.vision.placed import PlacedPictures, picture_rows, place_pictures
from palestra.types import Datum, ImageChunk, Picture, PlacedImage, RoutedExperts, TensorData
from palestra.types.training import routed_bytes

MAX_CELLS = 1 << 28  # of a sparse tensor once it is dense: 1 GiB of float32
IGNORED = -100
"""The target id by which torch and others say that a position is not learned."""
COUNTING = ("weights", "advantages", "sequence_ratio_mask")
"""Loss inputs by which a position counts; where all of a loss's own are 0, its target may be IGNORED."""


@dataclass(frozen=True, slots=True)
class TrainItem:
    """One datum for one adapter (None: the base model, forward only) under one loss."""

    adapter: Adapter | None
    datum: Datum
    loss: str = "cross_entropy"
    config: Mapping[str, float] = field(default_factory=dict)
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    """Those that the datum names, by their digests."""


@dataclass(frozen=True, slots=True)
class Prepared:
    adapter: Adapter | None
    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    """[N, K]; K is 1 except for distillation."""
    inputs: dict[str, NDArray[np.float32]]
    """Each [N, K]."""
    loss: Loss
    config: dict[str, float]
    wide: bool
    """Targets came as [N, K]: log-probabilities go back in that shape."""
    routing: NDArray[np.int64] | None = None
    """[N, layers with experts, experts per token]: those to visit, -1 in rows for which the router chooses."""
    pictures: PlacedPictures | None = None
    """Where `tokens` has ids of pictures' rows instead."""

    @property
    def active(self) -> NDArray[np.bool_]:
        """Positions that can have a gradient."""
        return (self.inputs[self.loss.gate] != 0).any(axis=1)


def prepare(item: TrainItem, spec: ModelSpec) -> Prepared:
    loss = loss_named(item.loss)
    tokens, pictures = _tokens(item.datum, spec, item.pictures)
    given = dict(item.datum.loss_inputs)
    if "target_tokens" not in given:
        raise DataError("loss input 'target_tokens' is missing")
    targets = decode(given.pop("target_tokens"), "target_tokens", integer=True)
    _check_shape("target_tokens", targets, len(tokens), any_width=loss.gate == "weights")
    inputs = {name: decode(data, name) for name, data in given.items()}
    _check_names(inputs, loss)
    if loss.gate == "weights" and "weights" not in inputs:
        inputs["weights"] = np.ones(targets.shape, np.float32)
    for name, array in inputs.items():
        if array.shape != targets.shape:
            raise DataError(
                f"loss input {name!r} has shape {list(array.shape)}, target_tokens has {list(targets.shape)}"
            )
        if not np.isfinite(array).all():
            raise DataError(f"loss input {name!r} holds NaN or infinity")
    targets = _without_ignored(targets, inputs)
    _check_range("target_tokens", targets, spec.vocab_size)
    rows = len(tokens)
    prepared = Prepared(
        item.adapter,
        tokens,
        targets.reshape(rows, -1),
        {name: array.reshape(rows, -1) for name, array in inputs.items()},
        loss,
        loss.settle(item.config),
        wide=targets.ndim == 2,
        routing=None if item.datum.routing is None else decode_routing(item.datum.routing, rows, spec),
        pictures=pictures,
    )
    if pictures is not None:
        _check_targets(prepared)
    return prepared


def decode(tensor: TensorData, name: str, *, integer: bool = False) -> NDArray:
    """A wire tensor as a dense array; sparse rows are filled with zeros."""
    dtype = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}[tensor.dtype]
    if integer and tensor.dtype != "int64":
        raise DataError(f"{name}: dtype must be int64, found {tensor.dtype}")
    try:
        values = np.frombuffer(tensor.data, dtype)
        if tensor.crow_indices is not None:
            values = _from_csr(tensor, values, name)
        array = values.reshape(tensor.shape) if tensor.shape else values
    except ValueError as e:
        raise DataError(f"{name}: {len(tensor.data)} bytes do not fill shape {list(tensor.shape)} ({e})") from None
    return array if integer else array.astype(np.float32, copy=False)


def _from_csr(tensor: TensorData, values: NDArray, name: str) -> NDArray:
    if len(tensor.shape) != 2 or tensor.crow_indices is None or tensor.col_indices is None:
        raise DataError(f"{name}: sparse tensors need two dimensions, crow_indices and col_indices")
    crow, col = (np.frombuffer(b, np.dtype("<i8")) for b in (tensor.crow_indices, tensor.col_indices))
    rows, columns = tensor.shape
    if rows < 0 or columns < 0 or rows * columns > MAX_CELLS:
        raise DataError(f"{name}: a {rows} x {columns} tensor is out of bounds (at most {MAX_CELLS} cells)")
    counts = np.diff(crow)
    sound = len(crow) == rows + 1 and crow[0] == 0 and crow[-1] == len(values) == len(col) and (counts >= 0).all()
    if not sound or (len(col) and not 0 <= col.min() <= col.max() < columns):
        raise DataError(f"{name}: sparse indices do not describe a {rows} x {columns} tensor")
    dense = np.zeros((rows, columns), values.dtype)
    dense[np.repeat(np.arange(rows), counts), col] = values
    return dense


def encode(array: NDArray) -> TensorData:
    """The wire form of a dense array."""
    dtype = "int64" if np.issubdtype(array.dtype, np.integer) else "float32"
    wire = np.ascontiguousarray(array, "<i8" if dtype == "int64" else "<f4")
    return TensorData(data=wire.tobytes(), dtype=dtype, shape=array.shape)


def decode_routing(routing: RoutedExperts, rows: int, spec: ModelSpec) -> NDArray[np.int64]:
    """The experts of each of `rows` positions, -1 where none were recorded."""
    experts = next(iter(spec.experts.values()), None)
    if experts is None:
        raise DataError(f"the datum says which experts its tokens visit, but {spec.architecture} has none")
    shape, item_bytes = (rows, len(spec.experts), experts.per_token), routed_bytes(experts.n_experts)
    if routing.shape != shape or len(routing.data) != math.prod(shape) * item_bytes:
        found = f"{list(routing.shape)} in {len(routing.data)} bytes"
        raise DataError(f"routing has shape {found}; it must be {list(shape)}, with {item_bytes} for each number")
    ids = np.frombuffer(routing.data, f"<u{item_bytes}").reshape(shape).astype(np.int64)
    is_missing = (ids == (1 << 8 * item_bytes) - 1).all(axis=(1, 2), keepdims=True)
    ids = np.where(is_missing, -1, ids)
    if ids.max() >= experts.n_experts:
        raise DataError(f"routing: expert {ids.max()} does not exist; each layer has {experts.n_experts}")
    return ids


def _tokens(
    datum: Datum, spec: ModelSpec, pictures: Mapping[str, Picture]
) -> tuple[NDArray[np.int64], PlacedPictures | None]:
    """Returns the tokens, with ids of rows where pictures stand."""
    found: list[int] = []
    images: list[PlacedImage] = []
    for chunk in datum.chunks:
        if isinstance(chunk, ImageChunk):
            images.append(PlacedImage(len(found), chunk.digest))
            found += [0] * picture_rows(chunk.digest, spec, pictures)
        else:
            found += chunk.tokens
    if not found:
        raise DataError("the datum has no tokens")
    if len(found) > spec.max_positions:
        raise DataError(f"the datum has {len(found)} tokens, the model's context is {spec.max_positions}")
    tokens = np.array(found, np.int64)
    _check_range("model_input", tokens, spec.vocab_size)
    if not images:
        return tokens, None
    placed = place_pictures(spec, images, pictures, len(found))
    return np.array(placed.with_ids(found), np.int64), placed


def _check_targets(data: Prepared) -> None:
    """Checks that no position predicts a row of a picture."""
    odd = np.flatnonzero((data.tokens[1:] < 0) & data.active[:-1])
    if len(odd):
        raise DataError(
            f"position {odd[0]} predicts a row of a picture, but its {data.loss.gate} are not 0; a picture's rows are "
            "targets of nothing: send 0 there"
        )


def _without_ignored(targets: NDArray, inputs: Mapping[str, NDArray]) -> NDArray:
    """Returns targets with id 0 in place of IGNORED: what does not count may be any token, but -100 is no index."""
    ignored = targets == IGNORED
    if not ignored.any():
        return targets
    for name in COUNTING:
        counting = np.argwhere(ignored & (inputs[name] != 0)) if name in inputs else []
        if len(counting):
            place = "".join(f"[{index}]" for index in counting[0])
            raise DataError(
                f"target_tokens{place} is {IGNORED}, which means that the position is ignored, but {name}{place} is "
                f"{inputs[name][tuple(counting[0])]:g}; send 0 there, or the id of a token"
            )
    return np.where(ignored, 0, targets)


def _check_range(name: str, tokens: NDArray, vocab_size: int) -> None:
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        odd = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise DataError(f"{name}: token id {odd} is outside the vocabulary of {vocab_size}")


def _check_shape(name: str, array: NDArray, rows: int, *, any_width: bool) -> None:
    fits = array.shape == (rows,) or (any_width and array.ndim == 2 and array.shape[0] == rows and array.shape[1] > 0)
    if not fits:
        expected = f"[{rows}] or [{rows}, K]" if any_width else f"[{rows}]"
        raise DataError(f"{name} has shape {list(array.shape)}; the datum has {rows} tokens, so it must be {expected}")


def _check_names(inputs: Mapping[str, NDArray], loss: Loss) -> None:
    for name in loss.required:
        if name not in inputs:
            raise DataError(f"loss {loss.name.value!r} needs the loss input {name!r}")
    for name in inputs:
        if name not in (*loss.required, *loss.optional):
            known = ", ".join(("target_tokens", *loss.required, *loss.optional))
            raise DataError(f"loss {loss.name.value!r} has no loss input {name!r} (known: {known})")
