"""A gym that NeMo RL drives: it takes rows and returns logs of messages with token ids. Begin at `rollouts`."""

from palestra.gym.nemo_rl.rollouts import NemoRlGym

__all__ = ["NemoRlGym"]
