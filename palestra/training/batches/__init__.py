"""Converts rollouts, or conversations in a file, to the rows of a batch. Begin at `grpo_batch` and `sft_examples`."""
