"""Several turns: the environment answers each guess."""

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class Guess(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    pass


class GuessTasks(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self):
        for number in range(1, 7):
            yield Guess(GuessData(prompt="Guess my number, 1 to 6.", name=f"guess-{number}", number=number))


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "direct"}, max_turns=4)


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment, tries = await interaction.turn(), 1
            while not segment.terminated and segment.last_reply != str(task.data.number):
                segment, tries = await interaction.turn("no"), tries + 1
        won = not segment.terminated
        interaction.trace.record_reward("won", float(won) / tries)


__all__ = ["GuessEnv", "GuessTasks"]
