"""Reads the weights of a decoder's linear layers as they are kept: in the model's type, or in 8 or 4 bits.

The weight of a new frozen linear layer is read here, and used through `lora_linear` or `dense`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from palestra.model.loading.quantised_cache import QuantisedCache
from palestra.model.loading.row_share import HeldRows, RowShare
from palestra.model.loading.tensor_parallel import WHOLE, TensorShard
from palestra.model.loading.weight_files import WeightFiles
from palestra.model.quantised.forms import Form, packed_shapes, quantise
from palestra.model.quantised.packed import FrozenWeight, PackedWeight, Scratch, as_stack

Rows = Sequence[tuple[str, int | tuple[int, ...]]]
"""Names of weights that share an input, with their outputs; of a stack, how many weights and their outputs."""
Shapes = Sequence[tuple[str, tuple[int, ...]]]
Cut = Literal["outputs", "inputs"]
"""Which dimension of a weight is divided among ranks that compute every layer together."""


@dataclass(frozen=True, slots=True)
class Transposed:
    """Stacks that plain files have as [..., inputs, outputs]."""

    shape: tuple[int, ...]
    order: Callable[[Tensor], Tensor] = lambda rows: rows
    """Puts outputs, [..., outputs, n], into the order in which matrix products take them."""

    def arrange(self, weight: Tensor) -> Tensor:
        return self.order(weight.mT)


class LinearWeightsReader:
    """Reads the weights of linear layers from a model's files, one weight or a stack of experts at a time."""

    def __init__(
        self,
        files: WeightFiles,
        dtype: torch.dtype,
        device: torch.device,
        form: Form | None = None,
        cache: QuantisedCache | None = None,
        share: RowShare | None = None,
        tensor: TensorShard = WHOLE,
    ):
        self.files, self.dtype, self.device, self.form, self.cache = files, dtype, device, form, cache
        self.share, self.tensor, self.scratch, self._count = share, tensor, Scratch(), 0

    def read(self, parts: Rows, inputs: int, cut: Cut | None = None) -> FrozenWeight:
        """Returns the parts one below the other, [all outputs, inputs]: one matrix product instead of several."""
        if cut is not None and self.tensor.ranks > 1:
            return self._read_cut(parts, inputs, cut)
        return self._read(parts, inputs, None, None)

    def read_stack(
        self,
        parts: Rows,
        inputs: int,
        n: int,
        stored: Transposed | None = None,
        cut: Cut | None = None,
        projections: int = 1,
    ) -> FrozenWeight:
        """The parts as a stack of n weights, [n, outputs, inputs]. `projections`: how many each weight of a part has
        one below the other."""
        if cut is not None and self.tensor.ranks > 1:
            return as_stack(self._read_cut(parts, inputs, cut, stored, projections), n)
        weight = self._read(parts, inputs, stored, n)
        return weight if self.share is not None else as_stack(weight, n)

    def _read_cut(
        self, parts: Rows, inputs: int, cut: Cut, stored: Transposed | None = None, projections: int = 1
    ) -> Tensor:
        """This rank's outputs of each projection, or its inputs of all of them; nothing else is read, but of stacks
        that files have transposed."""
        shapes = [(name, (n,) if isinstance(n, int) else n) for name, n in parts]
        ranks, columns = (self.tensor.ranks, slice(0, inputs)) if cut == "outputs" else (1, self.tensor.own(inputs))
        counts = [prod(shape) // ranks for _, shape in shapes]
        held = torch.empty(sum(counts), columns.stop - columns.start, dtype=self.dtype, device=self.device)
        for (name, shape), place in zip(shapes, held.split(counts), strict=True):
            size = shape[-1] // projections
            own = self.tensor.own(size)
            if stored is not None:
                whole = stored.arrange(self.files.tensor(name, stored.shape)).reshape(-1, size, inputs)
                place.copy_((whole[:, own] if cut == "outputs" else whole[..., columns]).flatten(0, 1))
            elif cut == "inputs":
                self.files.read_columns(name, (*shape, inputs), columns, place)
            else:
                firsts = range(0, prod(shape), size)
                spans = [slice(first + own.start, first + own.stop) for first in firsts]
                self.files.read_rows(name, (*shape, inputs), spans, place)
        return held

    def _read(self, parts: Rows, inputs: int, stored: Transposed | None, stack: int | None) -> FrozenWeight:
        shapes = [(name, (n,) if isinstance(n, int) else n) for name, n in parts]
        if self.form is not None and self.form.fits(inputs):
            return self._read_packed(shapes, inputs, self._form_of(shapes, self.form), stored)
        if self.share is not None:
            return self._read_share(shapes, inputs, self.share, stored, stack)
        counts = [prod(shape) for _, shape in shapes]
        whole = torch.empty(sum(counts), inputs, dtype=self.dtype, device=self.device)
        for (name, shape), place in zip(shapes, whole.split(counts), strict=True):
            if stored is None:
                self.files.read_into(name, place.view(*shape, inputs))
            elif self.device.type == "meta":
                self.files.read_into(name, torch.empty(stored.shape, device=self.device))
            else:
                place.view(*shape, inputs).copy_(stored.arrange(self.files.tensor(name, stored.shape)))
        return whole

    def _read_share(
        self, parts: Shapes, inputs: int, share: RowShare, stored: Transposed | None, stack: int | None
    ) -> Tensor:
        """Reads only the rows of this process; of stacks that files have transposed, all."""
        count = sum(prod(shape) for _, shape in parts)
        unit = 1 if stack is None else count // stack
        own = share.rows(count // unit)
        own = slice(own.start * unit, own.stop * unit)
        held = torch.empty(own.stop - own.start, inputs, dtype=self.dtype, device=self.device)
        start = 0
        for name, shape in parts:
            stop = start + prod(shape)
            first, last = max(start, own.start), min(stop, own.stop)
            if first < last:
                rows, place = slice(first - start, last - start), held[first - own.start : last - own.start]
                if stored is None:
                    self.files.read_rows(name, (*shape, inputs), [rows], place)
                else:
                    place.copy_(stored.arrange(self.files.tensor(name, stored.shape)).flatten(0, -2)[rows])
            start = stop
        share.weights.append(HeldRows(held, count, stack))
        return held

    def _read_packed(self, parts: Shapes, inputs: int, form: Form, stored: Transposed | None) -> PackedWeight:
        """Each part is quantised alone and dropped, so that one of them at a time is there in full."""
        number, self._count = self._count, self._count + 1
        shapes, code_type = packed_shapes(form, sum(prod(shape) for _, shape in parts), inputs)
        cache = None if all(self._is_kept(name, shape, inputs, form) for name, shape in parts) else self.cache
        kept = cache.get(number, shapes, code_type) if cache is not None else None
        if kept is not None:
            codes, scales = (tensor.to(self.device) for tensor in kept)
            self.files.skip(name for name, _ in parts)
            return PackedWeight(form, codes, scales, self.dtype, self.scratch)
        codes = torch.empty(shapes[0], dtype=code_type, device=self.device)
        scales = torch.empty(shapes[1], device=self.device)
        start = 0
        for name, shape in parts:
            rows = slice(start, start := start + prod(shape))
            found = self._quantised(name, shape, inputs, form, stored)
            codes[rows], scales[rows] = (tensor.flatten(0, -2) for tensor in found)
        if cache is not None:
            cache.put(number, codes, scales)
        return PackedWeight(form, codes, scales, self.dtype, self.scratch)

    def _form_of(self, parts: Shapes, form: Form) -> Form:
        """Returns the form, with as many inputs to a scale as the files have if all parts are four-bit integers."""
        groups = {self.files.int4_group(name) for name, _ in parts} if form.name == "int4" else set()
        group = groups.pop() if len(groups) == 1 else None
        return form if group is None else replace(form, group=group)

    def _is_kept(self, name: str, shape: tuple[int, ...], inputs: int, form: Form) -> bool:
        """Whether the files have it in this form, so that its codes stay as they are: FP8 and four-bit integers of
        single weights, MXFP4 of stacks."""
        if form.name == "int4":
            return len(shape) == 1 and self.files.int4_group(name) == form.group_of(inputs)
        return form.name == self.files.packing(name) == ("fp8" if len(shape) == 1 else "mxfp4")

    def _quantised(
        self, name: str, shape: tuple[int, ...], inputs: int, form: Form, stored: Transposed | None
    ) -> tuple[Tensor, Tensor]:
        is_kept = self._is_kept(name, shape, inputs, form)
        if stored is not None and is_kept:
            codes, scales = self.files.packed_mxfp4(name, stored.shape)
            return stored.order(codes), stored.order(scales)
        if stored is not None:
            return quantise(stored.arrange(self.files.tensor(name, stored.shape)).to(self.device), form)
        if is_kept and form.name == "int4":
            return self.files.packed_int4(name, (shape[0], inputs))
        if is_kept:
            return self.files.packed_fp8(name, (shape[0], inputs), form.group_of(inputs))
        return quantise(self.files.tensor(name, (*shape, inputs)).to(self.device), form)
