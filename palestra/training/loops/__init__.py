"""The training loops and what a step reports about itself. Begin at `grpo`, `sft` or `dpo`."""
