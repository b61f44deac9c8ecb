"""Names of NeMo RL's configs for the translation: metrics, and keys that are not needed here."""

from __future__ import annotations

VALIDATION = {"accuracy": "eval/reward_mean", "total_reward/mean": "eval/reward_mean"}
"""Our names of NeMo RL's metrics of validations."""
NOT_NEEDED = {
    "cluster": "which machines, the server says",
    "policy.megatron_cfg": "how a model is spread over devices, the server says",
    "policy.dtensor_cfg": "how a model is spread over devices, the server says",
    "policy.dynamic_batching": "rows are always packed",
    "policy.sequence_packing": "rows are always packed",
    "policy.make_sequence_length_divisible_by": "rows are always packed",
    "policy.train_micro_batch_size": "the engine chooses it",
    "policy.logprob_batch_size": "the engine chooses it",
    "policy.logprob_chunk_size": "the engine chooses it",
    "policy.generation_batch_size": "the engine chooses it",
    "policy.offload_optimizer_for_logprob": "the engine chooses it",
    "policy.precision": "the engine chooses it",
    "policy.draft": "the sampler drafts no tokens",
    "policy.generation": "sampling is the server's",
    "data.num_workers": "rows are read at once",
    "data.max_input_seq_length": "a gym's rows are not cut",
    "data.use_multiple_dataloader": "entries of environments are mixed by weight",
    "data.default": "rows are read as the gym's",
    "data.train": "rows are read as the gym's",
    "data.validation": "rows are read as the gym's",
    "data_plane": "there is one process",
    "logger": "a run's folder has everything",
    "checkpointing": "checkpoints are in the run's folder",
    "grpo.val_batch_size": "rollout.concurrency holds for evaluations, too",
    "grpo.max_rollout_turns": "the gym's agent says how many turns there are",
    "grpo.skip_reference_policy_logprobs_calculation": "they are computed if penalty.kl is set",
    "grpo.async_grpo": "asynchronous.enabled is false, or rollouts end on the weights that they began with",
    "grpo.reward_shaping": "it is off",
    "grpo.reward_scaling": "it is off",
    "grpo.calculate_advantages_on_gpu": "the engine chooses it",
    "grpo.adv_estimator": "algorithm.advantage has it",
    "grpo.dynamic_sampling_max_gen_batches": "use_dynamic_sampling is off",
    "loss_fn.reference_policy_kl_type": "the penalty is off",
    "loss_fn.kl_input_clamp_value": "the penalty is off",
    "loss_fn.kl_output_clamp_value": "the penalty is off",
    "loss_fn.use_on_policy_kl_approximation": "the penalty is off",
    "loss_fn.use_importance_sampling_correction": "ratios are always to the sampler's own logprobs",
    "loss_fn.force_on_policy_ratio": "ratios are always to the sampler's own logprobs",
    "loss_fn.truncated_importance_sampling_type": "algorithm.correction has it",
    "env.should_log_nemo_gym_responses": "answers are always kept",
}
"""By the beginning of their names: keys without an effect on what is learned, and why they are not needed."""
