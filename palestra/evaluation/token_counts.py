"""Metrics of a rollout: tokens as the endpoint counted them."""

PROMPT_TOKENS, SAMPLED_TOKENS = "prompt_tokens", "sampled_tokens"
