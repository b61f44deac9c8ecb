"""What a checkpoint can be exported as, and in which dtype."""

from __future__ import annotations

from typing import Literal

ExportForm = Literal["peft", "merged"]
"""An adapter for PEFT and vLLM, or a whole model."""
ExportDtype = Literal["bfloat16", "float16", "float32"]
"""What the weights of a whole model are written in."""
