"""Safetensors files of a model folder as one mapping of names."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from palestra.model.errors import WeightsError
from palestra.model.loading.bitsandbytes_files import BlockState, check_sizes, read_state, state_name, unpack_blocks
from palestra.model.loading.packed_files import (
    PACKED_TYPES,
    PackedFileError,
    Packing,
    fp8_group_scales,
    int4_codes,
    mxfp4_scales,
    packed_names,
    plain_name,
    plain_shape,
    unpack,
)
from palestra.model.loading.progress import LoadProgress
from palestra.model.loading.safetensors_file import SafetensorsFile

PREFIXES = ("model.", "model.language_model.", "language_model.model.", "backbone.")
"""What the names of the text model's tensors begin with, by who wraps it."""
EMBEDDINGS = {"embed_tokens.weight": "norm.weight", "embeddings.weight": "norm_f.weight"}
"""What the embedding is called, and the last norm beside it."""
HEADS = ("lm_head.weight", "language_model.lm_head.weight")


class WeightFiles:
    """The shards of one folder as a single mapping of names; opens each file once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[str, SafetensorsFile] = {}
        self.file_of = _index(folder)
        self.unpacked: Counter[str] = Counter()
        """How many weights were dequantised, by the form they had in the files."""
        self.progress: LoadProgress | None = None

    def __enter__(self) -> WeightFiles:
        for file in self.files:
            self._shard(file)
        return self

    def __exit__(self, *exc: object) -> None:
        for shard in self._open.values():
            shard.close()
        self._open.clear()

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(self.file_of.values()))

    def __iter__(self) -> Iterator[str]:
        """Names of the weights; a packed one has the name that it has in plain files."""
        names = (plain_name(name, self.file_of) for name in self.file_of)
        return iter(dict.fromkeys(name for name in names if name is not None))

    def __contains__(self, name: str) -> bool:
        """Whether there is a weight of this name, plain or packed."""
        return name in self.file_of or packed_names(name, self.file_of) is not None

    @property
    def prefix(self) -> str:
        """The prefix of the names of the decoder's tensors."""
        return self._outer_names[0]

    @property
    def embedding(self) -> str:
        prefix, name = self._outer_names
        return prefix + name

    @property
    def last_norm(self) -> str:
        prefix, name = self._outer_names
        return prefix + EMBEDDINGS[name]

    @property
    def _outer_names(self) -> tuple[str, str]:
        """The prefix, and the embedding's name behind it."""
        names = [(prefix, name) for name in EMBEDDINGS for prefix in PREFIXES]
        return next((found for found in names if "".join(found) in self.file_of), names[0])

    @property
    def head(self) -> str:
        """The name of the unembedding, which some wrappers put among the text model's tensors."""
        return next((name for name in HEADS if name in self), HEADS[0])

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """A weight; one that the files keep in 4 or 8 bits is dequantised."""
        self._check(name, shape)
        packed = packed_names(name, self.file_of)
        if packed is None:
            return self._read(name)
        self.unpacked[packed.packing] += 1
        if packed.packing == "bnb4":
            return unpack_blocks(name, self._block_state(name), self._read)
        return unpack(packed.packing, self._read(packed.codes), self._read(packed.scales))

    def packing(self, name: str) -> Packing | None:
        """The form of 4 or 8 bits in which the files keep this weight; None where they do not."""
        packed = packed_names(name, self.file_of)
        return None if packed is None else packed.packing

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype in which the files keep this weight; None for one of 4 or 8 bits."""
        if self.packing(name) is not None:
            return None
        self.shape(name)  # which refuses dtypes that are none of ours
        dtype = self._header(name)[1]
        return dtype if isinstance(dtype, torch.dtype) else None

    def int4_group(self, name: str) -> int | None:
        """Returns how many inputs share a scale, for a weight in four-bit integers; None for other weights."""
        if self.packing(name) != "int4":
            return None
        return self.shape(name)[-1] // self._header(f"{name}_scale")[0][-1]

    def packed_int4(self, name: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """A weight that the files keep in four-bit integers, as it is: its codes, two in a byte, and its groups'
        scales as float32."""
        self._check(name, shape)
        return int4_codes(self._read(f"{name}_packed")), self._read(f"{name}_scale").float()

    def packed_fp8(self, name: str, shape: tuple[int, int], group: int) -> tuple[Tensor, Tensor]:
        """A weight that the files keep in FP8, as it is: its codes, and scales of each row's groups."""
        self._check(name, shape)
        return self._read(name), fp8_group_scales(self._read(f"{name}_scale_inv"), *shape, group)

    def packed_mxfp4(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """A weight that the files keep in MXFP4 and that plain files would have in this shape: its codes as they are,
        [..., outputs, inputs / 2], and their groups' scales as float32."""
        self._check(name, shape)
        codes, exponents = self._read(f"{name}_blocks"), self._read(f"{name}_scales")
        return codes.flatten(-2), mxfp4_scales(exponents)

    def _check(self, name: str, shape: tuple[int, ...] | None) -> None:
        found = self.shape(name)
        if shape is not None and found != shape:
            raise WeightsError(
                f"{self._place(name)}: tensor {name!r} has shape {list(found)}, config.json asks for {list(shape)}"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, by the headers alone. Raises WeightsError where they tell that it cannot be read."""
        packed = packed_names(name, self.file_of)
        if packed is None:
            shape, dtype = self._header(name)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise WeightsError(
                    f"{self._place(name)}: tensor {name!r} has dtype {dtype}; supported: floating-point weights"
                )
            if dtype == torch.float8_e4m3fn:
                raise WeightsError(
                    f"{self._place(name)}: tensor {name!r} has dtype {dtype}, but its scales ({name}_scale_inv) are "
                    "missing; download it again"
                )
            return shape
        (codes, dtype), (scales, _) = self._header(packed.codes), self._header(packed.scales)
        if dtype != (needed := PACKED_TYPES[packed.packing]):
            raise WeightsError(
                f"{self._place(packed.codes)}: tensor {packed.codes!r} has dtype {dtype}; with {packed.scales!r} "
                f"beside it, it must have {needed}"
            )
        try:
            if packed.packing == "bnb4":
                state = self._block_state(name)
                check_sizes(name, state, lambda part: self._header(part)[0])
                return tuple(state.shape)
            return plain_shape(packed.packing, codes, scales)
        except PackedFileError as e:
            raise WeightsError(
                f"{self._place(packed.codes)}: {packed.packing} weight {name!r}: {e}; download it again"
            ) from None

    def read_into(self, name: str, place: Tensor) -> None:
        """Fills a tensor with a weight of its shape. A place on the device `meta` only has the headers checked."""
        self._check(name, tuple(place.shape))
        if place.device.type == "meta":
            return
        if packed_names(name, self.file_of) is not None:
            place.copy_(self.tensor(name))
            return
        self._shard_of(name).read_into(name, place)
        self._count(name)

    def read_rows(self, name: str, shape: tuple[int, ...], spans: Sequence[slice], place: Tensor) -> None:
        """Fills [rows, inputs] with some rows of a weight of this shape, all its leading axes counted as rows."""
        self._check(name, shape)
        is_packed = packed_names(name, self.file_of) is not None
        whole = self.tensor(name).flatten(0, -2) if is_packed else None
        for rows, part in zip(spans, place.split([rows.stop - rows.start for rows in spans]), strict=True):
            if whole is not None:
                part.copy_(whole[rows])
            else:
                self._shard_of(name).read_into(name, part, first=rows.start * shape[-1])
        if not is_packed:
            self._count(name)

    def read_columns(self, name: str, shape: tuple[int, ...], columns: slice, place: Tensor) -> None:
        """Fills [rows, some columns] with those columns of a weight of this shape, all its leading axes counted as
        rows."""
        self._check(name, shape)
        if packed_names(name, self.file_of) is not None:
            place.copy_(self.tensor(name).flatten(0, -2)[:, columns])
            return
        self._shard_of(name).read_columns(name, columns.start, place)
        self._count(name)

    def skip(self, names: Iterable[str]) -> None:
        """Counts weights as read that are taken from elsewhere."""
        for name in names:
            packed = packed_names(name, self.file_of)
            for stored in (name,) if packed is None else (packed.codes, packed.scales):
                self._count(stored)

    def _count(self, name: str) -> None:
        if self.progress is not None:
            self.progress.add(self._shard_of(name).tensors[name].size_bytes)

    def _header(self, name: str) -> tuple[tuple[int, ...], torch.dtype | str]:
        found = self._shard_of(name).tensors.get(name)
        if found is None:
            raise WeightsError(
                f"{self._place(name)}: tensor {name!r} is missing, but the index names it; download it again"
            )
        return found.shape, found.dtype

    def _read(self, name: str) -> Tensor:
        found = self._shard_of(name).read(name)
        self._count(name)
        return found

    def _block_state(self, name: str) -> BlockState:
        stored = state_name(name, self.file_of)
        return read_state(self._shard_of(stored).read(stored), prod(self._header(name)[0]))

    def _place(self, name: str) -> Path:
        return self.folder / self.file_of.get(name, "")

    def _shard_of(self, name: str) -> SafetensorsFile:
        file = self.file_of.get(name)
        if file is None:
            raise WeightsError(
                f"{self.folder}: no tensor named {name!r} in the safetensors files; the config asks for it"
            )
        return self._shard(file)

    def _shard(self, file: str) -> SafetensorsFile:
        if file not in self._open:
            path = self.folder / file
            if not path.is_file():
                raise WeightsError(f"{path}: this shard is missing, but the index names it; download it again")
            self._open[file] = SafetensorsFile(path)
        return self._open[file]


def _index(folder: Path) -> dict[str, str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (json.JSONDecodeError, KeyError, TypeError) as e:
            raise WeightsError(f"{index}: not a valid shard index ({e!r})") from None
    single = folder / "model.safetensors"
    if not single.is_file():
        raise WeightsError(
            f"{folder}: no model.safetensors and no model.safetensors.index.json; "
            "only safetensors weights are supported"
        )
    shard = SafetensorsFile(single)
    shard.close()
    return dict.fromkeys(shard.tensors, single.name)
