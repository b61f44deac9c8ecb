"""The platform's apps as a world of tools: mail, forge, stay, forum, keys, and worlds of several."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from palestra.environments.platform import Instance, PlatformError, PlatformTask, make_task, verify
from palestra.environments.platform.golden import ANSWER_TOOL
from palestra.gym.errors import BadCall
from palestra.gym.servers.resources import ResourcesServer, ResourcesSettings
from palestra.gym.servers.responses import output_text
from palestra.gym.servers.states import Session
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload

MAX_CHANGES = 50  # rows that are returned, for people to read
ANSWER_SPEC = {
    "type": "function",
    "name": ANSWER_TOOL,
    "description": "Give the final answer, if the task asks for one.",
    "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
    "strict": False,
}


class Play(Struct):
    task: PlatformTask
    instance: Instance
    answer: str | None = None


class PlatformWorld(ResourcesServer[ResourcesSettings]):
    async def seed_session(self, session: Session, task_key: str) -> JsonMapping:
        task = _task(task_key)
        session.state = Play(task, Instance(task.seed, variables=task.variables))
        return {}

    async def call_tool(self, session: Session, name: str, arguments: Any) -> Any:
        """Calls a tool. An unknown tool is an error of the model, and the model gets the error."""
        play: Play = session.state
        if name != ANSWER_TOOL:
            return play.instance.call(name, arguments).text
        answer = arguments.get("answer") if isinstance(arguments, dict) else None
        if not isinstance(answer, str):
            return '{"error": "bad_arguments", "hint": "answer is a text"}'
        play.answer = answer
        return '{"status": "noted"}'

    async def verify(self, session: Session, response: JsonObject, task_key: str) -> JsonMapping:
        play: Play = session.state
        verdict = verify(play.task, play.instance, play.answer or output_text(response))
        if verdict.score is None:
            return {"reward": 0.0, "mask_sample": True, "failure_reason": "the verifier broke"}
        key = play.task.key
        extra: JsonObject = {"app": key.app, "template": key.template, "difficulty": key.difficulty}
        extra |= {"met": verdict.met, "missed": verdict.missed, "stdout": "\n".join(verdict.failed)}
        extra |= {"changes": msgspec.to_builtins(play.instance.changes()[:MAX_CHANGES])}
        return {"reward": verdict.score, "checks_met": len(verdict.met) / max(1, verdict.checks), **extra}

    def compute_metrics(self, tasks: list[list[JsonMapping]]) -> JsonPayload:
        """Success by app and difficulty."""
        rewards: dict[str, list[float]] = {}
        for one in (rollout for task in tasks for rollout in task):
            rewards.setdefault(f"{one.get('app')}/{one.get('difficulty')}", []).append(one["reward"])
        return {f"mean/reward/{name}": sum(found) / len(found) for name, found in sorted(rewards.items())}

    def release(self, state: Play) -> None:
        state.instance.close()


def row_of(task_key: str, agent: str | None = None) -> JsonObject:
    """Returns a row for the data file of this server."""
    task = _task(task_key)
    tools = [
        {
            "type": "function",
            "name": one.name,
            "description": one.description,
            "parameters": one.parameters,
            "strict": False,
        }
        for one in task.app.tools
    ]
    row = {"responses_create_params": {"input": task.prompt, "tools": [*tools, ANSWER_SPEC]}, "task_key": str(task.key)}
    return row | {"agent_ref": {"type": "responses_api_agents", "name": agent}} if agent else row


def _task(task_key: str) -> PlatformTask:
    try:
        return make_task(task_key)
    except PlatformError as error:
        raise BadCall(422, str(error)) from error
