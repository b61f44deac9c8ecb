"""Prompts without a verifier: one turn that nothing grades.

The prompts come from a file; what is learned comes from a teacher or a judge.
"""

from __future__ import annotations

from palestra.environments.text import BaseTextEnv, BaseTextEnvStepOutput


class Prompts(BaseTextEnv):
    """A single turn without a reward of its own."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        return BaseTextEnvStepOutput(observations=[], reward=None, done=True, metadata={})
