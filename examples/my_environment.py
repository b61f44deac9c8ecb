"""An environment of one's own: guess a number. In this folder: palestra env play my_environment:Guess"""

from palestra.environments import BaseTextEnv, BaseTextEnvStepOutput


class Guess(BaseTextEnv):
    """Guess a number from 1 to 100; a hint after each try."""

    max_turns = 8

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        guess = int(action) if action.strip().isdecimal() and len(action) < 9 else None
        if guess == self.extras["number"]:
            return BaseTextEnvStepOutput(observations=[], reward=1.0, done=True, metadata={})
        hint = "say a number" if guess is None else "higher" if guess < self.extras["number"] else "lower"
        observations = [{"role": "user", "content": hint}]
        return BaseTextEnvStepOutput(
            observations=observations, reward=0.0, done=self.turns >= self.max_turns, metadata={}
        )

    @staticmethod
    def tasks(split: str) -> list[dict]:
        numbers = range(1, 101, 2) if split == "train" else range(2, 101, 2)
        return [{"id": f"guess-{n}", "prompt": "Guess my number, 1 to 100.", "number": n} for n in numbers]
