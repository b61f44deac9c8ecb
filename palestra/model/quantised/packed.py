"""A frozen weight in 8 or 4 bits, which products take as they take a plain one.

Before a product it is written out in the model's type, into memory that all weights of a model share. So the product is
the one that plain weights have, for every number of rows, in sampler and trainer alike: what was promised of its bits
holds.

Expert stacks on a CPU are laid out by their inputs, in place (`by_inputs`): before they are divided among ranks. Plain
and packed ones must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from palestra.model import kernels
from palestra.model.quantised.forms import Form, levels, quantise

CHUNK_GROUPS = 1 << 11  # written out at once on a CPU: what is in between stays in its cache


class Scratch:
    """Memory for one weight at a time, as large as the largest that was announced."""

    def __init__(self) -> None:
        self._size = 0
        self._memory: Tensor | None = None

    def announce(self, size: int) -> None:
        self._size = max(self._size, size)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = torch.Size(shape).numel()
        if self._memory is None or self._memory.numel() < size:
            with torch.inference_mode(False):  # the sampler may come first, and the trainer writes here, too
                self._memory = torch.empty(max(size, self._size), dtype=dtype, device=device)
        return self._memory[:size].view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    form: Form
    codes: Tensor
    """[..., outputs, inputs] in 8 bits; half as many bytes in 4."""
    scales: Tensor
    """[..., outputs, groups], float32."""
    dtype: torch.dtype
    """What the weight is written out in."""
    scratch: Scratch = field(default_factory=Scratch, repr=False)

    def __post_init__(self) -> None:
        self.scratch.announce(self.numel())

    @classmethod
    def of(cls, weight: Tensor, form: Form, dtype: torch.dtype, scratch: Scratch) -> PackedWeight:
        return cls(form, *quantise(weight, form), dtype, scratch)

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, size = self.codes.shape
        return *rows, size * 8 // self.form.bits

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def numel(self) -> int:
        return self.codes.numel() * 8 // self.form.bits

    def __getitem__(self, index: int | slice) -> PackedWeight:
        """One weight of a stack, or some of them."""
        return replace(self, codes=self.codes[index], scales=self.scales[index])

    def is_read_in_place(self, x: Tensor) -> bool:
        """Whether a product with rows x reads the codes: few rows on a Hopper card, where the bits are those of the
        weight written out. Other cards may round otherwise, and older ones do not know 8-bit floats."""
        if not kernels.can_run(x.device, x.dtype) or x.dtype != self.dtype or not kernels.is_hopper(x.device):
            return False
        from palestra.model.kernels.packed_linear import is_worth_it

        return is_worth_it(len(x), len(self.codes), self.form)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias, by the codes."""
        from palestra.model.kernels.packed_linear import packed_linear

        return packed_linear(x, self.codes, self.scales, self.form, bias)

    def dense(self, only: Sequence[int] | None = None) -> Tensor:
        """The weight written out: good until another one of the same model is. Of a stack, `only` these: the others
        are whatever was there before."""
        out = self.scratch.take(self.shape, self.dtype, self.codes.device)
        if only is None:
            dequantise(self.codes, self.scales, self.form, out)
        else:
            for i in only:
                dequantise(self.codes[i], self.scales[i], self.form, out[i])
        return out


FrozenWeight = Tensor | PackedWeight


def dense(weight: FrozenWeight) -> Tensor:
    """The weight as a product takes it. Use it at once: see `PackedWeight.dense`."""
    return weight.dense() if isinstance(weight, PackedWeight) else weight


def dense_stack(stack: FrozenWeight, only: Sequence[int]) -> Tensor:
    """A stack of weights as products take it; on a CPU, of packed ones `only` these are written out."""
    if isinstance(stack, Tensor):
        return stack
    return by_inputs(stack.dense(only), only) if stack.codes.device.type == "cpu" else stack.dense()


def by_inputs(stack: Tensor, only: Sequence[int]) -> Tensor:
    """The same weights, laid out by their inputs, in place: for the few rows that an expert has, OpenBLAS on ARM takes
    up to 3 times as long where these are not the rows in memory."""
    turned = stack.view(len(stack), stack.shape[2], stack.shape[1])
    for i in only:
        turned[i] = stack[i].T.contiguous()
    return turned.mT


def as_stack(weight: FrozenWeight, n: int) -> FrozenWeight:
    """[n * outputs, inputs] as a stack of n weights."""
    if isinstance(weight, Tensor):
        stack = weight.unflatten(0, (n, -1))
        return by_inputs(stack, range(n)) if weight.device.type == "cpu" else stack
    return replace(weight, codes=weight.codes.unflatten(0, (n, -1)), scales=weight.scales.unflatten(0, (n, -1)))


def as_laid_out(stack: Tensor) -> Tensor:
    """A stack in the memory that `as_stack` has laid out."""
    return stack.view(len(stack), stack.shape[2], stack.shape[1]).mT if stack.device.type == "cpu" else stack


def dequantise(codes: Tensor, scales: Tensor, form: Form, out: Tensor) -> None:
    """Writes the weights into `out`, [..., outputs, inputs] and contiguous."""
    if kernels.can_run_on(out.device):
        from palestra.model.kernels.dequantise import dequantise as run

        run(codes, scales, form, out)
        return
    scales = scales.reshape(-1, 1)
    codes, out = codes.reshape(len(scales), -1), out.view(len(scales), -1)
    pairs = _pairs(form, out.device) if form.bits == 4 else None
    for start in range(0, len(scales), CHUNK_GROUPS):
        part = slice(start, start + CHUNK_GROUPS)
        if pairs is not None:
            found = pairs.index_select(0, codes[part].flatten().to(torch.int32)).view(torch.float32)
            torch.mul(found.view(-1, out.shape[1]), scales[part], out=out[part])
        elif form.name == "int8":
            torch.mul(codes[part], scales[part], out=out[part])
        else:
            out[part].copy_(codes[part]).mul_(scales[part])  # the copy is exact: such codes have three digits


def _pairs(form: Form, device: torch.device) -> Tensor:
    """The two levels that a byte names, beside each other in one number of 8 bytes: one lookup for both."""
    table = levels(form.name).to(device)
    return torch.stack([table.repeat(16), table.repeat_interleave(16)], 1).view(torch.int64).flatten()
