"""The world of `benchmarks/gym.py`: a tool that says something small, a verdict that looks at the answer."""

from __future__ import annotations

from typing import Any

from palestra.gym.servers.resources import ResourcesServer, ReverifyMode, tool
from palestra.gym.servers.responses import output_text


class Weather(ResourcesServer):
    reverify_mode = ReverifyMode.STATELESS

    @tool
    async def get_weather(self, city: str) -> dict[str, Any]:
        """The weather in a city."""
        return {"city": city, "weather": "cold"}

    async def verify(self, response: dict[str, Any]) -> bool:
        return "cold" in output_text(response)
