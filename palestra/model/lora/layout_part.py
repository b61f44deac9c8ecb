"""What one of several ranks that share every layer computes of an adapter.

Of projections whose outputs are divided, a rank has its columns of B and all of A; of those whose inputs are, its
columns of A and all of B. The gradient of what is whole is a sum over ranks.

Owns: which numbers of an adapter's row those are. Never touches: products, how ranks talk.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from palestra.model.loading.tensor_share import TensorShare
from palestra.model.lora.layout import Layout


@dataclass(frozen=True, slots=True)
class LayoutPart:
    share: TensorShare
    whole: Layout
    own: Layout

    def read(self, row: Tensor, part: Tensor) -> None:
        """Copies this rank's part of a whole row."""
        wholes, parts = self._matrices(row, part)
        for name, own in parts.items():
            own.copy_(wholes[name])

    def write(self, part: Tensor, row: Tensor) -> None:
        """Makes a row of a part, so that the rows of all ranks add up: zeros where others have numbers. What all ranks
        compute alike is the first one's."""
        row.zero_()
        wholes, parts = self._matrices(row, part)
        left_out = set() if self.share.rank == 0 else self._undivided()
        for name, own in parts.items():
            if name not in left_out:
                wholes[name].copy_(own)

    def _matrices(self, row: Tensor, part: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Those of the part, and where they are in the whole row."""
        parts, wholes = self.own.matrices(part), self.whole.matrices(row)
        for name, own in parts.items():
            for axis, size in enumerate(own.shape):
                if wholes[name].shape[axis] != size:
                    wholes[name] = wholes[name].narrow(axis, self.share.rank * size, size)
        return wholes, parts

    def _undivided(self) -> set[str]:
        """Matrices of sites that every rank computes as a whole."""
        same = [site for name, site in self.own.sites.items() if self._is_same(name)]
        return {f"{p.module}.lora_{kind}.weight" for site in same for p in site.parts for kind in "AB"}

    def _is_same(self, name: tuple[int, str]) -> bool:
        whole, own = self.whole.sites[name], self.own.sites[name]
        return whole.in_size == own.in_size and whole.parts[0].out_size == own.parts[0].out_size
