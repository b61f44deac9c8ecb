"""The apps as OpenEnv environments, `/openenv/{app}/…`: HTTP, WebSockets, MCP with sessions, tasks."""

from palestra.environments.platform.faces.openenv.face import OpenEnv

__all__ = ["OpenEnv"]
