"""The weights of a decoder's products, read as they are kept: in the model's type, or in 8 or 4 bits.

Owns: joining projections, quantising them one by one. Never touches: names of families, where weights are used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from palestra.model.loading.weight_files import WeightFiles
from palestra.model.quantised.forms import Form, quantise
from palestra.model.quantised.packed import FrozenWeight, PackedWeight, Scratch

Rows = Sequence[tuple[str, int]]
"""Names of weights that share an input, with their outputs."""


class ProductReader:
    def __init__(self, files: WeightFiles, dtype: torch.dtype, device: torch.device, form: Form | None):
        self.files, self.dtype, self.device, self.form = files, dtype, device, form
        self.scratch = Scratch()

    def read(self, parts: Rows, inputs: int) -> FrozenWeight:
        """The parts stacked: one product instead of several."""
        outputs = sum(n for _, n in parts)
        if self.form is None or not self.form.fits(inputs):
            whole = torch.empty(outputs, inputs, dtype=self.dtype, device=self.device)
            for (name, n), place in zip(parts, whole.split([n for _, n in parts]), strict=True):
                place.copy_(self.files.tensor(name, (n, inputs)))
            return whole
        quantised = [self._quantised(name, n, inputs, self.form) for name, n in parts]
        codes, scales = (
            torch.cat(tensors) if len(parts) > 1 else tensors[0] for tensors in zip(*quantised, strict=True)
        )
        return PackedWeight(self.form, codes, scales, self.dtype, self.scratch)

    def _quantised(self, name: str, outputs: int, inputs: int, form: Form) -> tuple[Tensor, Tensor]:
        if self.files.packing(name) == form.name == "fp8":
            codes, scales = self.files.packed_fp8(name, (outputs, inputs), form.group_of(inputs))
            return codes.to(self.device), scales.to(self.device)
        return quantise(self.files.tensor(name, (outputs, inputs)).to(self.device), form)
