"""What a checkpoint can be exported as."""

from __future__ import annotations

from typing import Literal

ExportForm = Literal["peft", "merged"]
"""An adapter for PEFT and vLLM, or a whole model."""
