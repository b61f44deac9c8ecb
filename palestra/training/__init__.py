"""Training runs: rollouts become groups, advantages, batches and steps.

Begin at `launch`, which opens a run from its config. `loops/` has GRPO, SFT and DPO, `rollouts/` the sources of
rollouts, `batches/` the data of a step, `policy` the interface to the weights.
"""
