"""A gym that NeMo RL drives: rows in, logs of messages with token ids out. Begin at `rollouts`."""

from palestra.gym.nemo_rl.rollouts import NemoRlGym

__all__ = ["NemoRlGym"]
