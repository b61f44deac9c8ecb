"""The platform for clients outside of its process: MCP, Fleet's REST API, OpenEnv.

Begin at `app.PlatformApp`. Nothing is imported here: `stdio` needs no server.
"""
