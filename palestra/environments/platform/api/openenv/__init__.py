"""The apps as OpenEnv environments, `/openenv/{app}/…`: HTTP, WebSockets, MCP with sessions, tasks.

Begin at `routes.OpenEnvRoutes`. Nothing is imported here: `package` needs no server.
"""
