"""The names of weights in a GGUF file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from palestra.checkpoints import CheckpointError
from palestra.checkpoints.gguf.families import GgufFamily

if TYPE_CHECKING:
    from gguf import TensorNameMap

_ENDS = {
    "self_attn.sinks": "self_attn.sinks.weight",
    "linear_attn.dt_bias": "linear_attn.dt_proj.bias",
    "mixer.dt_bias": "mixer.dt.bias",
    "gate.e_score_correction_bias": "gate.e_score_correction.bias",
    "experts.gate_proj_bias": "experts.gate_proj.bias",
    "experts.up_proj_bias": "experts.up_proj.bias",
    "experts.down_proj_bias": "experts.down_proj.bias",
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
}
"""Parameters that the format counts as weights, biases or scales."""
_PLAIN = re.compile(r".*\.(experts\.(gate|up|gate_up|down)_proj|layer_scalar)")


class WeightNames:
    """Names of a file for those of a Hugging Face folder."""

    def __init__(self, family: GgufFamily, n_layers: int) -> None:
        import gguf

        by_name = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        self._names: TensorNameMap = gguf.get_tensor_name_map(by_name[family.architecture], n_layers)
        self._architecture = family.architecture

    def of(self, plain: str) -> str:
        """Returns the name of a parameter or a module. Raises CheckpointError where the format has none."""
        leaf = ".".join(plain.rsplit(".", 2)[1:])
        named = (plain.removesuffix(leaf) + _ENDS.get(leaf, leaf)).replace(".mixer.experts.", ".mlp.experts.")
        spellings = (named, f"backbone.{named.removeprefix('model.')}")
        found = (self._names.get_name(one, try_suffixes=(".weight", ".bias", ".scale")) for one in spellings)
        name = next((one for one in found if one is not None), None)
        if name is None:
            raise CheckpointError(f"GGUF has no name for {plain} in a model of {self._architecture}")
        return f"{name}.weight" if _PLAIN.fullmatch(plain) else name
