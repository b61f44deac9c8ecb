"""A real OpenEnv server for the tests; run in a Python that has openenv. Its argument is the port."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn  # type: ignore[import-not-found]
from fastmcp import FastMCP  # type: ignore[import-not-found]
from openenv.core.env_server.http_server import create_app  # type: ignore[import-not-found]
from openenv.core.env_server.mcp_environment import MCPEnvironment  # type: ignore[import-not-found]
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation  # type: ignore[import-not-found]
from openenv.core.env_server.types import Action, Observation, State  # type: ignore[import-not-found]


class Counter(MCPEnvironment):
    """Count to what the task says."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("counter")
        self.count, self.goal = 0, 0

        @server.tool
        def add(n: int) -> dict[str, int]:
            """Add to the count."""
            self.count += n
            return {"count": self.count}

        @server.tool
        def fail() -> str:
            """Never works."""
            raise RuntimeError("no")

        super().__init__(server)

    def reset(self, seed: Any = None, episode_id: Any = None, goal: int = 3, **_: Any) -> Observation:
        self.count, self.goal = 0, goal
        return Observation()

    def step(self, action: Action, timeout_s: Any = None, **kwargs: Any) -> Observation:
        found = super().step(action, timeout_s, **kwargs)
        found.reward = float(self.count == self.goal)
        return found

    async def step_async(self, action: Action, timeout_s: Any = None, **kwargs: Any) -> Observation:
        found = await super().step_async(action, timeout_s, **kwargs)
        found.reward = float(self.count == self.goal)
        return found

    def _step_impl(self, action: Action, timeout_s: Any = None, **kwargs: Any) -> Observation:
        return Observation(done=True)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_app(Counter, CallToolAction, CallToolObservation, env_name="counter", max_concurrent_envs=4)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
