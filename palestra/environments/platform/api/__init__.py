"""The platform for those who are not in its process: MCP, Fleet's REST API, OpenEnv.

The way in is `app.PlatformApp`. Nothing is imported here: `stdio` needs no server.

Begin at `app`.
"""
