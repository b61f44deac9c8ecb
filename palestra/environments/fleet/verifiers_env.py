"""Fleet tasks for `verifiers` (0.4 and later), where that is installed: a taskset, its environment, a harness.

For example:

    pip install ./integrations/palestra_fleet     # the package through which verifiers finds this module
    vf-eval palestra-fleet -n 8 --env.taskset.tasks-file "platform:mail?difficulty=0"
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from palestra.environments.fleet.env import FleetTaskEnv
from palestra.types.rollouts import Task
from palestra.util.json_types import JsonObject

try:
    import httpx
    import verifiers.v1 as vf
    from pydantic import Field
    from verifiers.v1.dialects.chat import message_to_wire
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(
        f"this module needs {e.name}; to install: pip install 'verifiers>=0.4'", name=e.name
    ) from None

__all__ = ["FleetEnv", "FleetHarness", "FleetTaskset"]

REWARD = "verifier"


class FleetData(vf.TaskData):
    """The prompt is the task's own; the system message, with the tools, is known once an instance exists."""

    extras: JsonObject
    """Arguments with which the environment is made."""


class FleetVfTask(vf.Task[FleetData, vf.State, vf.TaskConfig]):
    @property
    def key(self) -> str:
        return self.data.extras["task_key"]


class FleetConfig(vf.TasksetConfig):
    tasks_file: str = "platform:keys"
    """A file, or `platform:mail?difficulty=0,1&count=200`."""
    split: Literal["train", "eval"] = "eval"
    env_config: JsonObject = Field(default_factory=dict)
    """Settings of `fleet_task`: backend, prompt_style and the like. They are not written to traces."""
    max_turns: int | None = None
    """By default each task's own."""


class FleetTaskset(vf.Taskset[FleetVfTask, FleetConfig]):
    def load(self) -> Iterator[FleetVfTask]:
        for task in FleetTaskEnv.tasks(self.config.split, self.env_config):
            yield FleetVfTask(self._data(task), self.config.task)

    @property
    def env_config(self) -> JsonObject:
        if self.config.env_config.get("enable_context_tools"):
            raise ValueError("verifiers keeps whole conversations; leave out enable_context_tools")
        return {**self.config.env_config, "tasks_file": self.config.tasks_file}

    def _data(self, task: Task) -> FleetData:
        turns = {} if self.config.max_turns is None else {"max_turns": self.config.max_turns}
        prompt = task.prompt[0]["content"]
        return FleetData(id=task.id, name=task.id, prompt=str(prompt), extras={**task.extras, **turns})


class FleetHarness(vf.Harness[vf.HarnessConfig]):
    """Requests one message of the model at a time: its calls are text, so no program is needed."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
        messages = [*([{"role": "system", "content": system}] if system else []), *turns]
        # Their server is in between, and waits for the model as long as the run's own limits say.
        async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
            answer = await http.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        return vf.ProgramResult(exit_code=int(answer.is_error), stdout="", stderr=answer.text)


class FleetEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class FleetEnv(vf.Env[FleetEnvConfig]):
    """One episode. However it ends, the verifier runs once; the instance is closed at the end."""

    async def run(self, task: FleetVfTask, agents: vf.Agents) -> None:
        env = FleetTaskEnv(self.taskset.env_config, task.data.extras)
        try:
            history, _ = await env.init_async([])
            prompted = task.with_data(system_prompt=history[0]["content"], prompt=history[1]["content"])
            async with agents.player.interaction(prompted) as interaction:
                reward = await self._played(env, interaction)
        finally:
            await env.close_async()
        numbers = {name: float(value) for name, value in env.get_metrics().items() if isinstance(value, int | float)}
        interaction.trace.record_metrics(numbers)
        if reward is None:
            # A failed episode must not count; a 0 would be a guess.
            raise vf.EnvError(f"{task.key} has no reward, because its verifier failed")
        interaction.trace.record_reward(REWARD, reward)

    async def _played(self, env: FleetTaskEnv, interaction: vf.Interaction) -> float | None:
        segment = await interaction.turn()
        while not segment.terminated:
            step = await env.step_async(segment.last_reply)
            if step["done"]:
                return step["reward"]
            segment = await interaction.turn(step["observations"][0]["content"])
        return await env.grade_async()
