"""Forms in which a checkpoint can be exported, and their dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PublishedForm = Literal["peft", "merged"]
"""An adapter for PEFT and vLLM, or a whole model: what can be published with a model card."""
ExportForm = Literal["peft", "merged", "gguf", "gguf-adapter", "ollama"]
"""Also a whole model or an adapter as a GGUF file, for llama.cpp, and one with a Modelfile, for Ollama."""
ExportDtype = Literal["bfloat16", "float16", "float32", "fp8", "nf4"]
"""What the weights of a whole model are written in; fp8 and nf4: those of linear layers, all others in bfloat16."""
GgufQuant = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4"]
"""What the matrices of a GGUF file are written in; mxfp4: those of experts, and all others in q8_0."""


@dataclass(frozen=True, slots=True)
class GgufSettings:
    """How a GGUF file is written."""

    quant: GgufQuant | None = None
    """None: as the base is stored."""
    pre_tokenizer: str | None = None
    """The name, in llama.cpp's list, of how text is split into words; None: that of the model's own tokenizer."""
    ollama_base: str | None = None
    """The model of Ollama to which the adapter is added, for the form `ollama`; None: the whole model is written."""
