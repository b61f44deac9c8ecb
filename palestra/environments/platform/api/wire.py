"""Records in the format of Fleet's REST API."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from palestra.environments.platform.app import TaskApp
from palestra.environments.platform.pool_records import InstanceRecord
from palestra.environments.platform.task_records import PlatformTask
from palestra.util.json_types import JsonPayload

REGION = "local"
TASKS_MADE_AT = "2026-01-01T00:00:00+00:00"
"""Tasks are made from their keys and have no date of their own; the SDK requires one."""
VERIFIER_PREFIX = "verifier-"


def time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def environment(app: TaskApp) -> JsonPayload:
    return {
        "env_key": app.key,
        "name": app.title,
        "description": app.description,
        "default_version": app.version,
        "versions": {app.version: app.version},
    }


def instance(record: InstanceRecord, base_url: str, login: str = "") -> JsonPayload:
    """`login` is for the address of its runner."""
    spec = record.wanted
    return {
        "instance_id": record.id,
        "env_key": spec.app,
        "version": spec.version,
        "status": str(record.state),
        "subdomain": record.id,
        "created_at": time_text(record.created_at),
        "updated_at": time_text(record.updated_at),
        "terminated_at": time_text(record.ended_at) if record.ended_at is not None else None,
        "team_id": record.team,
        "region": spec.region or REGION,
        "env_variables": dict(spec.variables),
        "data_key": spec.data,
        "data_version": spec.version,
        "health": not record.is_over,
        "run_id": spec.run_id,
        "heartbeat_interval": None if spec.heartbeat_s is None else int(spec.heartbeat_s),
        "ttl_seconds": record.ttl_s,
        "warnings": warnings(record),
        "reason": record.reason or None,
        "urls": urls(f"{base_url}/i/{record.id}/", login),
    }


def warnings(record: InstanceRecord) -> list[str]:
    """Returns what was requested and is different."""
    asked_s = record.wanted.ttl_s
    if asked_s is None or asked_s <= record.ttl_s:
        return []
    return [f"ttl_seconds {asked_s:.0f} is more than the limit; it was reduced to {record.ttl_s:.0f}"]


def urls(root: str, login: str = "") -> JsonPayload:
    """Returns the addresses. The root ends with a slash, because the SDK adds `mcp` to it. The SDK's `env.app(name)`
    keeps of the runner's address only what is before the path: there a login says which instance is meant."""
    scheme, _, rest = f"{root}api/v1/env".partition("://")
    api = f"{scheme}://{login}@{rest}" if login else f"{scheme}://{rest}"
    return {
        "root": root,
        "app": [root],
        "api": f"{root}api",
        "health": f"{api}/health",
        "manager": {
            "api": api,
            "docs": root,
            "reset": f"{api}/reset",
            "diff": f"{api}/diff/structured",
            "snapshot": f"{api}/snapshot",
            "execute_verifier_function": f"{api}/execute_verifier_function",
            "execute_verifier_function_with_upload": f"{api}/execute_verifier_function",
        },
    }


def task(one: PlatformTask, team: str, source: str) -> JsonPayload:
    key = str(one.key)
    return {
        "key": key,
        "prompt": one.prompt,
        "team_id": team,
        "environment_id": one.app.key,
        "created_at": TASKS_MADE_AT,
        "version": one.app.version,
        "data_id": one.seed.key,
        "data_version": one.app.version,
        "env_variables": dict(one.variables),
        "metadata": {"difficulty": one.key.difficulty, "split": one.key.split, "max_turns": one.template.max_turns},
        "verifier_id": f"{VERIFIER_PREFIX}{key}",
        "verifier_func": source,
    }


def verifier(key: str, source: str) -> JsonPayload:
    return {
        "verifier_id": f"{VERIFIER_PREFIX}{key}",
        "key": key,
        "version": 1,
        "sha256": sha_of(source),
        "code": source,
        "created_at": TASKS_MADE_AT,
    }


def sha_of(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()
