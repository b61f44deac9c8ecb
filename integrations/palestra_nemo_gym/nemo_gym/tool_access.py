"""An agent's access to the tools of an episode."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AnyHttpUrl, BaseModel, ConfigDict, Field

Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class _Access(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Name
    required: bool


class DirectHTTPToolAccess(_Access):
    """A route for each tool."""

    kind: Literal["direct_http"] = "direct_http"
    base_url: AnyHttpUrl
    cookies: dict[str, str] = Field(default_factory=dict)
    headers: dict[str, str] = Field(default_factory=dict)


class MCPStreamableHTTPConnection(BaseModel):
    model_config = ConfigDict(extra="forbid")

    transport: Literal["streamable_http"] = "streamable_http"
    url: AnyHttpUrl
    headers: dict[str, str] = Field(default_factory=dict)


class MCPToolAccess(_Access):
    kind: Literal["mcp"] = "mcp"
    connection: MCPStreamableHTTPConnection


ToolAccess: TypeAlias = Annotated[DirectHTTPToolAccess | MCPToolAccess, Field(discriminator="kind")]
