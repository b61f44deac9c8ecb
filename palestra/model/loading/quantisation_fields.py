"""Reads the fields of config.json about weights in 8 or 4 bits, and refuses forms that cannot be read."""

from __future__ import annotations

from typing import Any

from palestra.model.errors import UnsupportedModel
from palestra.model.loading.packed_files import FP8_BLOCK

METHODS = ("mxfp4", "fp8", "compressed-tensors", "bitsandbytes")
PACK_QUANTIZED = "pack-quantized"
INT4: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "actorder": (None, "weight"),
}
"""What compressed-tensors must say of weights. With `actorder` "group", inputs would stand in another order."""


def refuse_packing(source: str, quantised: Any) -> None:
    """Raises UnsupportedModel unless weights are quantised in a way that can be read."""
    place = f"{source}: field 'quantization_config'"
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if method not in METHODS:
        raise UnsupportedModel(
            f"{place}: weights quantised by {method!r} are not supported, only {', '.join(METHODS[:-1])} and "
            f"{METHODS[-1]}; use the float32 or bfloat16 release of this model"
        )
    block = quantised.get("weight_block_size")
    if method == "fp8" and block not in (None, [FP8_BLOCK, FP8_BLOCK]):
        raise UnsupportedModel(f"{place}: weight_block_size is {block!r}; supported: [{FP8_BLOCK}, {FP8_BLOCK}]")
    if method == "bitsandbytes" and not (quantised.get("load_in_4bit") or quantised.get("_load_in_4bit")):
        raise UnsupportedModel(
            f"{place}: of bitsandbytes only weights in 4 bits (load_in_4bit) are supported; use the bfloat16 release "
            "of this model"
        )
    if method == "compressed-tensors" and (found := _unreadable(quantised)) is not None:
        raise UnsupportedModel(
            f"{place}: {found}; of compressed-tensors only {PACK_QUANTIZED!r} weights in symmetric groups of four-bit "
            "integers are supported; use the bfloat16 release of this model"
        )


def _unreadable(quantised: dict[str, Any]) -> str | None:
    """The first thing in a config of compressed-tensors that cannot be read."""
    groups = quantised.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return "config_groups is missing"
    schemes = {name: scheme if isinstance(scheme, dict) else {} for name, scheme in groups.items()}
    formats = [quantised.get("format"), *(s["format"] for s in schemes.values() if s.get("format") is not None)]
    for found in formats:
        if found != PACK_QUANTIZED:
            return f"format is {found!r}"
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if quantised.get(key):
            return f"there is a {key}"
    for name, scheme in schemes.items():
        for key in ("input_activations", "output_activations"):
            if scheme.get(key) is not None:
                return f"{name} has {key}"
        weights = scheme.get("weights") or {}
        for key, readable in INT4.items():
            if (value := weights.get(key)) not in readable:
                return f"{key} of {name} is {value!r}"
    return None
