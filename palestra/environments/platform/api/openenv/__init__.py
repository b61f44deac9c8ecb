"""The apps as OpenEnv environments, `/openenv/{app}/…`: HTTP, WebSockets, MCP with sessions, tasks.

The way in is `routes.OpenEnvRoutes`. Nothing is imported here: `package` needs no server. Begin at `routes`.
"""
