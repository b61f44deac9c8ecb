"""PEFT on length-sorted, right-padded batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from peers.hugging_face import PAD, load
from peers.workloads import TrainWork
from peft import LoraConfig, get_peft_model

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
IGNORED = -100


@dataclass(frozen=True, slots=True)
class PeftSetup:
    batch: int
    masked: bool = True
    """False leaves the attention mask out: rows are padded on the right and attention is causal, so no wanted token
    sees padding, and torch may take its faster causal kernel."""

    def __str__(self) -> str:
        return f"PEFT, batch {self.batch}{'' if self.masked else ', no mask'}"


@dataclass(frozen=True, slots=True)
class _Batch:
    ids: torch.Tensor
    mask: torch.Tensor | None
    targets: torch.Tensor


class PeftTrainer:
    """Adapters as ours: rank 32 on all projections and the unembedding, AdamW with the same settings."""

    def __init__(self, folder: Path, *, dtype: str, device: str):
        base = load(folder, attention="sdpa", dtype=dtype, device=device)
        config = LoraConfig(r=32, lora_alpha=32, lora_dropout=0.0, target_modules=MODULES, task_type="CAUSAL_LM")
        # Adapters in the model's own dtype: in bfloat16 that spares it casts and is its fastest form.
        self.model = get_peft_model(base, config, autocast_adapter_dtype=False)
        self.model.train()
        self.device, self.vocab_size = base.device, base.config.vocab_size
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, fused=True)

    def stepper(self, work: TrainWork, setup: PeftSetup) -> Callable[[], float]:
        """One optimizer step over all data; returns the summed loss."""
        batches = self._batches(work, setup)

        def step() -> float:
            losses = [self._forward_backward(batch) for batch in batches]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return float(torch.stack(losses).sum())

        return step

    def _forward_backward(self, batch: _Batch) -> torch.Tensor:
        logits = self.model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss.backward()
        return loss.detach()

    def _batches(self, work: TrainWork, setup: PeftSetup) -> list[_Batch]:
        data = sorted(work.data(self.vocab_size), key=len)
        batches = []
        for start in range(0, len(data), setup.batch):
            rows = data[start : start + setup.batch]
            width = max(map(len, rows)) - 1
            ids = torch.full((len(rows), width), PAD)
            targets = torch.full((len(rows), width), IGNORED)
            for i, tokens in enumerate(rows):
                ids[i, : len(tokens) - 1] = torch.from_numpy(tokens[:-1])
                targets[i, : len(tokens) - 1] = torch.from_numpy(tokens[1:])
            mask = (targets != IGNORED).long().to(self.device) if setup.masked else None
            batches.append(_Batch(ids.to(self.device), mask, targets.to(self.device)))
        return batches
