"""What the routes of the platform and of a gym do, in one sentence each.

Their functions are made by tables in the code and have no docstrings. The docs build compares: a route without a
sentence here, or a sentence without a route, fails it.
"""

_RUNNER = {
    "GET {at}/api/v1/env/resources": "The databases of the instance: `seed` and `current`.",
    "GET {at}/api/v1/env/health": "Whether the instance runs.",
    "GET {at}/api/v1/env/resources/sqlite/{resource}/describe": "Tables and columns of a database.",
    "POST {at}/api/v1/env/resources/sqlite/{resource}/query": "Run an SQL query; `current` may also be written.",
    "POST {at}/api/v1/env/diff/structured": "What changed between `seed` and `current`.",
    "POST {at}/api/v1/env/reset": "Go back to the seed, or to another of the same size.",
    "POST {at}/api/v1/env/execute_verifier_function": "Run a verifier's source on the instance.",
}

PLATFORM = {
    "POST /i/{id}/mcp": "MCP: list and call the tools of an instance.",
    "POST /i/{id}/api/v1/mcp": "The same, at the path where Fleet's SDK looks for it.",
    **{route.replace("{at}", "/i/{id}"): text for route, text in _RUNNER.items()},
    **{
        route.replace("{at}", "/{part}"): f"For one app of a world: {text[0].lower()}{text[1:]}"
        for route, text in _RUNNER.items()
    },
    "GET /i/{id}": "The app of an instance, and whether it runs.",
    "GET /v1/env": "The apps that there are.",
    "GET /v1/env/{name}": "One app.",
    "POST /v1/env/instances": "Make an instance of an app.",
    "GET /v1/env/instances": "The instances of the team.",
    "GET /v1/env/runs": "The team's instances by the run they were made for.",
    "DELETE /v1/env/instances/batch": "Close many instances of the team.",
    "GET /v1/env/instances/{name}": "One instance.",
    "DELETE /v1/env/instances/{name}": "Close an instance.",
    "POST /v1/env/instances/{name}/heartbeat": "Keep an instance alive.",
    "GET /v1/regions": "The regions, of which there is one.",
    "GET /v1/account": "The team, its limits, and how many instances are in memory and on disk.",
    "GET /v1/runner-auth/token": "A token that opens the runners of the team's instances.",
    "GET /v1/tasks": "Tasks by their keys, or a page of all that are listed.",
    "POST /v1/tasks": "Refused: tasks come from their keys and cannot be added.",
    "GET /v1/tasks/{name}": "One task, with the source of its verifier.",
    "PUT /v1/tasks/{name}": "Refused: tasks come from their keys and cannot be changed.",
    "GET /v1/verifiers/check": "Whether a verifier with this hash is known already.",
    "POST /v1/verifiers/execute": "Run the verifier of a task, or one that is sent along.",
    "GET /v1/verifiers/{name}": "The source of a task's verifier.",
    "GET /openenv/{app}/health": "OpenEnv: whether the environment answers.",
    "GET /openenv/{app}/metadata": "OpenEnv: what the environment is.",
    "GET /openenv/{app}/schema": "OpenEnv: JSON Schemas of actions and observations.",
    "GET /openenv/{app}/openapi.json": "OpenEnv: its own description.",
    "GET /openenv/{app}/state": "OpenEnv: the state of a fresh world, as there is none between two calls.",
    "GET /openenv/{app}/list_environments": "OpenEnv: the environments, of which there is one.",
    "GET /openenv/{app}/{env_name}/splits": "OpenEnv: `train` and `eval`.",
    "POST /openenv/{app}/reset": "OpenEnv: the first observation of a task.",
    "POST /openenv/{app}/step": "OpenEnv: one action in a fresh world.",
    "POST /openenv/{app}/{env_name}/tasks": "OpenEnv: tasks of a split, ten of each template.",
    "POST /openenv/{app}/{env_name}/num_tasks": "OpenEnv: how many tasks a split has.",
    "POST /openenv/{app}/{env_name}/task": "OpenEnv: one task by its index.",
    "POST /openenv/{app}/{env_name}/task_range": "OpenEnv: several tasks, at most 1,000.",
    "POST /openenv/{app}/mcp": "MCP with sessions.",
    "DELETE /openenv/{app}/mcp": "End such a session.",
    "WebSocket /openenv/{app}/ws": "OpenEnv: an episode on one connection.",
    "WebSocket /openenv/{app}/mcp": "MCP on one connection.",
    "GET /healthz": "Whether the platform answers.",
}

_IS_THERE = "Whether it answers."

GYM_HEAD = {
    "GET /": _IS_THERE,
    "GET /health": _IS_THERE,
    "GET /healthz": _IS_THERE,
    "GET /livez": _IS_THERE,
    "GET /readyz": "503 until all servers are healthy.",
    "GET /server_instances": "The servers: address, process, state, uptime, restarts.",
    "GET /global_config_dict_yaml": "The whole config, as a JSON string with YAML; other machines need the admin key.",
}

GYM_SERVERS = {
    "GET /": _IS_THERE,
    "GET /health": _IS_THERE,
    "GET /healthz": _IS_THERE,
    "GET /livez": _IS_THERE,
    "GET /readyz": _IS_THERE,
    "GET /openapi.json": "The routes of this server.",
    "GET /call_stats": "Calls it has answered by path, failures by class, and rates of the last minute.",
    "POST /aggregate_metrics": "Agents and resources servers: metrics over many rollouts.",
    "POST /close": "Worlds that move by steps: end a session.",
    "POST /close_session": "Resources servers: end a session.",
    "POST /mcp": "Resources servers with `expose_tools_over_mcp`: the tools over MCP.",
    "POST /reset": "Worlds that move by steps: begin a session.",
    "POST /run": "Agents: play a row, and have it verified.",
    "POST /seed_session": "Resources servers: begin a session with the fields of a row.",
    "POST /step": "Worlds that move by steps: one step with the model's answer.",
    "POST /v1/chat/completions": "Model servers: OpenAI's chat completions.",
    "POST /v1/messages": "Model servers: Anthropic's Messages.",
    "POST /v1/responses": "Model servers and agents: OpenAI's Responses.",
    "POST /verify": "Resources servers: the verdict about a rollout.",
    "POST /{tool}": "Resources servers: call the tool of this name.",
}
