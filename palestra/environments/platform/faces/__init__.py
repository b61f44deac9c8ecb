"""The platform for those who are not in its process: MCP, Fleet's REST API, OpenEnv."""

from palestra.environments.platform.faces.app import PlatformApp
from palestra.environments.platform.faces.door import Door

__all__ = ["Door", "PlatformApp"]
