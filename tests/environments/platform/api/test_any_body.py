"""Whatever is sent, the answer is one that was meant."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.environments.platform.api.conftest import Platform
from tests.properties import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
METHODS = st.sampled_from(["tools/call", "tools/list", "initialize", "ping", "server/discover", "x"]) | VALUES
MESSAGES = st.fixed_dictionaries(
    {"jsonrpc": st.just("2.0") | VALUES, "method": METHODS},
    optional={
        "id": VALUES,
        "params": st.fixed_dictionaries(
            {},
            optional={
                "name": st.sampled_from(["put", "set", "get", "list"]) | VALUES,
                "arguments": st.dictionaries(st.sampled_from(["name", "value"]), VALUES) | VALUES,
                "_meta": st.dictionaries(st.just("io.modelcontextprotocol/protocolVersion"), VALUES) | VALUES,
                "cursor": VALUES,
                "protocolVersion": VALUES,
            },
        )
        | VALUES,
    },
)
BODIES = st.dictionaries(
    st.sampled_from(
        [
            *("env_key", "data_key", "seed", "env_variables", "ttl_seconds", "heartbeat_interval", "run_id"),
            *("query", "args", "read_only", "ignore_config", "timestamp"),
            *("key", "sha256", "bundle", "args_array", "function_name", "timeout", "function_code", "text_solution"),
        ]
    ),
    VALUES,
)
PATHS = [
    "/v1/env/instances",
    "/v1/verifiers/execute",
    *(
        f"/i/{{id}}/api/v1/env/{name}"
        for name in ("reset", "diff/structured", "execute_verifier_function", "resources/sqlite/current/query")
    ),
]
FEW = examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
STATUSES = {200, 202, 400, 403, 404, 409, 410, 413}


@pytest.fixture(scope="module")
def instance_id(platform: Platform) -> str:
    return platform.make()["instance_id"]


def content(value: Any) -> bytes:
    return json.dumps(value).encode(errors="surrogatepass")


@FEW
@given(message=MESSAGES, version=st.sampled_from(["2025-11-25", "2026-07-28", "x", None]))
def test_any_message_to_mcp(platform: Platform, instance_id: str, message: Any, version: str | None):
    headers = {} if version is None else {"MCP-Protocol-Version": version}
    answer = platform.stranger.post(f"/i/{instance_id}/mcp", content=content(message), headers=headers)
    assert answer.status_code in {200, 202, 400, 404}
    if answer.status_code != 202:
        assert ("result" in answer.json()) != ("error" in answer.json())
        assert answer.json().get("error", {}).get("code") != -32603


@FEW
@given(path=st.sampled_from(PATHS), body=BODIES | VALUES)
def test_any_body_to_the_rest(platform: Platform, instance_id: str, path: str, body: Any):
    answer = platform.http.post(path.format(id=instance_id), content=content(body))
    assert answer.status_code in STATUSES - {404}
    assert answer.status_code == 200 or answer.json()["detail"]
