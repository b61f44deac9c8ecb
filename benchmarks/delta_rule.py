"""How long the delta net's kernels take at Qwen3.5-4B's sizes, beside the least time their bytes need.

python benchmarks/delta_rule.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch

from palestra.model.loading.layer_spec import DeltaNetSpec
from palestra.model.mixers.inputs import Recurrence

SPEC = DeltaNetSpec(n_key_heads=16, n_value_heads=32, key_dim=128, value_dim=128, conv_kernel=4)
DELTA_LAYERS = 24


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    from triton.testing import do_bench

    from palestra.model.kernels.causal_conv import causal_conv
    from palestra.model.kernels.delta_rule import Spans, delta_rule, delta_steps
    from palestra.model.mixers.kernel_recurrence import PackedKernelRecurrence, SpanArrays

    def rows(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv = torch.randn(n, SPEC.conv_size, device="cuda").bfloat16()
        beta = torch.rand(n, SPEC.n_value_heads, device="cuda")
        return qkv, beta, -0.2 * torch.rand(n, SPEC.n_value_heads, device="cuda")

    def show(what: str, run: Callable[..., object], *inputs: object, moved: int = 0) -> None:
        ms = float(do_bench(partial(run, *inputs), warmup=50, rep=200, return_mode="median"))  # pyright: ignore[reportArgumentType]
        speed = f", {moved / ms / 1e9:.2f} TB/s" if moved else ""
        print(f"{what}: {ms * 1e3:.0f} us a layer, {ms * DELTA_LAYERS:.1f} ms for {DELTA_LAYERS}{speed}", flush=True)

    def tables(lengths: list[int]) -> tuple[torch.Tensor, Spans]:
        arrays = SpanArrays.of(lengths, list(range(len(lengths))))
        rows, *spans = (torch.from_numpy(a).cuda() for a in (arrays.rows, arrays.table, arrays.chunks))
        return rows, Spans(*spans)

    def forward_backward(
        recur: Recurrence, leaves: list[torch.Tensor], weight: torch.Tensor, grad: torch.Tensor
    ) -> None:
        torch.autograd.grad(recur.scan(0, recur.convolve(0, leaves[0], weight), leaves[1], leaves[2]), leaves, grad)

    weight = torch.randn(SPEC.conv_kernel, SPEC.conv_size, device="cuda")
    for n in (1, 64, 256):
        row_table, spans = tables([1] * n)
        packed, states = rows(n), torch.zeros(n, *SPEC.state_shape, device="cuda")
        inputs = torch.zeros(n, *SPEC.conv_state_shape, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(n, SPEC.n_value_heads, SPEC.value_dim, device="cuda")
        moved = 2 * states.numel() * 4
        show(f"steps, {n} rows", delta_steps, *packed, spans, SPEC, states, out, moved=moved)
        alone = partial(causal_conv, are_alone=True)
        show(f"convolution, {n} rows", alone, packed[0], weight, row_table, inputs)
    for lengths in ([2048], [32768], [512] * 16):
        packed, (row_table, spans) = rows(sum(lengths)), tables(lengths)
        states = torch.zeros(len(lengths), *SPEC.state_shape, device="cuda")
        out = torch.empty(len(packed[0]), SPEC.n_value_heads, SPEC.value_dim, device="cuda")
        name = f"{len(lengths)} x {lengths[0]} tokens"
        show(f"steps, {name}", delta_steps, *packed, spans, SPEC, states, out)
        leaves = [x.requires_grad_() for x in packed]
        found = delta_rule(leaves[0], leaves[1], leaves[2], spans, SPEC)
        grad = torch.randn_like(found)
        show(f"gradient, {name}", partial(torch.autograd.grad, retain_graph=True), found, leaves, grad)
        recur = PackedKernelRecurrence(lengths, {0: SPEC}, "cuda")
        show(f"convolution, forward pass and gradients, {name}", forward_backward, recur, leaves, weight, grad)
    return 0


if __name__ == "__main__":
    sys.exit(main())
