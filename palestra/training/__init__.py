"""Training runs: rollouts become groups, advantages, batches and steps.

Begin at `launch`, which opens a run from its config. `loops/` has GRPO, SFT and DPO, `rollouts/` whoever plays,
`batches/` what the trainer is given, `policy` what all of them ask of the weights.
"""
