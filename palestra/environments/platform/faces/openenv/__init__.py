"""The apps as OpenEnv environments, `/openenv/{app}/…`: HTTP, WebSockets, MCP with sessions, tasks.

The way in is `face.OpenEnv`. Nothing is imported here: `package` needs no server.

Begin at `face`.
"""
