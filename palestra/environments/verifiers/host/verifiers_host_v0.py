"""Environments with the v0 interface of verifiers (`load_environment`), up to 0.3; part of the host."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient

JsonObject = dict[str, Any]
ATTEMPT = "palestra_attempt"
"""Field of a rollout's input, with the key and the seed of its model calls."""


class AttemptClient(OpenAIChatCompletionsClient):
    """Makes each call with the key and the seed of the rollout for which it is."""

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **more: Any) -> Any:
        state = more.get("state") or {}
        attempt = state.get("input", {}).get(ATTEMPT)
        if attempt is not None:
            more["extra_headers"] = {"Authorization": f"Bearer {attempt['api_key']}"}
            sampling_args = {**sampling_args, "seed": attempt["seed"] + len(state.get("trajectory") or [])}
        return await super().get_response(prompt, model, sampling_args, tools, **more)


class Hosted:
    interface = "v0"

    def __init__(self, name: str, args: JsonObject, env: JsonObject) -> None:
        if env:
            raise ValueError("config.env is for v1 environments; give the arguments of load_environment as args")
        self._name, self._args = name, args
        self._env: Any = None
        self._clients: dict[str, AttemptClient] = {}
        self.is_grouped = False

    async def open(self) -> None:
        self._env = vf.load_environment(self._name, **self._args)
        self.is_grouped = bool(getattr(self._env, "requires_group_rollouts", False))

    async def close(self) -> None:
        await self._env._teardown()
        for client in self._clients.values():
            await client.close()

    def tasks(self, split: str, limit: int) -> list[JsonObject]:
        has_own = self._env.eval_dataset is not None or getattr(self._env, "eval_dataset_source", None) is not None
        if split == "eval" and not has_own:
            return []
        found = self._dataset(split)
        places = range(min(limit, len(found)))
        return [{"index": place, "prompt": _messages(found[place].get("prompt"))} for place in places]

    def _dataset(self, split: str) -> Any:
        return self._env.get_eval_dataset() if split == "eval" else self._env.get_dataset()

    async def play(
        self,
        split: str,
        index: int,
        base_url: str,
        model: str,
        sampling: JsonObject,
        attempts: list[JsonObject],
    ) -> list[JsonObject]:
        """Plays a rollout, or a group together if its rewards are given to the group."""
        row = self._dataset(split)[index]
        inputs = [{**row, ATTEMPT: attempt} for attempt in attempts]
        client, sampling = self._client(base_url), {**self._env.sampling_args, **_openai(sampling)}
        if self.is_grouped:
            return [_outcome(one) for one in await self._env.run_group(inputs, client, model, sampling)]
        return [_outcome(await self._env.run_rollout(one, client, model, sampling)) for one in inputs]

    def _client(self, base_url: str) -> AttemptClient:
        if base_url not in self._clients:
            # Each call has the key of its rollout: see AttemptClient.
            own = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=8, timeout=None)
            self._clients[base_url] = AttemptClient(own)
        return self._clients[base_url]


def _openai(sampling: JsonObject) -> JsonObject:
    """OpenAI's SDK takes what it does not know as its extra body."""
    extra = {"extra_body": {"top_k": sampling["top_k"]}} if "top_k" in sampling else {}
    return {name: value for name, value in sampling.items() if name != "top_k"} | extra


def _outcome(output: Any) -> JsonObject:
    error, usage = output.get("error"), output.get("token_usage") or {}
    return {
        "reward": output.get("reward"),
        "rewards": {},
        "agents": None,
        "metrics": output.get("metrics") or {},
        "messages": [*_messages(output.get("prompt")), *_messages(output.get("completion"))],
        "stop": output.get("stop_condition") or "",
        "is_cut": bool(output.get("is_truncated")),
        "read": int(usage.get("input_tokens") or 0),
        "sampled": int(usage.get("output_tokens") or 0),
        "error": None if not error else _error(error),
    }


def _error(error: Any) -> dict[str, str]:
    if isinstance(error, dict):
        return {"type": str(error.get("error") or "Error"), "message": str(error.get("error_chain_str") or error)}
    return {"type": type(error).__name__, "message": str(error)}


def _messages(found: Any) -> list[JsonObject]:
    if isinstance(found, str):
        return [{"role": "user", "content": found}] if found else []
    plain = [one if isinstance(one, dict) else one.model_dump(exclude_none=True) for one in found or []]
    return json.loads(json.dumps(plain, default=str))
