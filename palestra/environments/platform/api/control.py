"""Fleet's control plane: environments, instances, tasks, accounts.

Errors have a status that the SDK takes as final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
from starlette.datastructures import QueryParams

from palestra.environments.platform.api import wire
from palestra.environments.platform.api.auth import PlatformAuth, PlatformRefusal
from palestra.environments.platform.api.http import read_as
from palestra.environments.platform.api.task_pages import MAX_DIGITS, page_of, page_with, tasks_in
from palestra.environments.platform.app import TaskApp
from palestra.environments.platform.catalog import APPS, app_of
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.pool import InstancePool
from palestra.environments.platform.pool_records import DuplicateRequest, InstanceRecord, InstanceSpec, LimitReached
from palestra.environments.platform.seeds import DEFAULT_DATA, seed_named
from palestra.environments.platform.task_records import FIRST_EVAL, PlatformTask
from palestra.environments.platform.tasks import WORLDS, make_task
from palestra.util.json_types import JsonObject, JsonPayload

TASKS_PER_TEMPLATE = 10
MAX_TASKS = 1000
OWN_PROFILE = "self"


class InstanceRequest(msgspec.Struct, kw_only=True):
    """Unknown fields pass: newer SDKs have more."""

    env_key: str
    env_version: str | None = None
    data_key: str | None = None
    data_version: str | None = None
    region: str | None = None
    seed: int | None = None
    timestamp: int | None = None
    p_error: float | None = None
    avg_latency: float | None = None
    run_id: str | None = None
    env_variables: JsonObject | None = None
    image_type: str | None = None
    ttl_seconds: float | None = None
    heartbeat_interval: float | None = None


@dataclass(slots=True)
class ControlRequest:
    """A request to the control plane."""

    team: str
    base_url: str
    query: QueryParams
    body: bytes
    request_id: str | None
    name: str
    """What the path names: an environment, an instance, a task, a verifier."""

    def one(self, name: str) -> str | None:
        return self.query.get(name) or None

    def count(self, name: str, default: int, most: int) -> int:
        text = self.one(name)
        if text is None:
            return default
        if not text.isdecimal() or len(text) > MAX_DIGITS or int(text) > most:
            raise PlatformRefusal(400, f"{name} must be a number from 0 to {most}")
        return int(text)


class ControlPlane:
    def __init__(self, pool: InstancePool, auth: PlatformAuth, source_of: Callable[[PlatformTask], str]) -> None:
        self.pool, self._auth, self._source_of = pool, auth, source_of

    # Environments

    def environments(self, request: ControlRequest) -> object:
        return [wire.environment(app) for app in APPS.values()]

    def environment(self, request: ControlRequest) -> object:
        return wire.environment(_app(request.name))

    def regions(self, request: ControlRequest) -> object:
        return [wire.REGION]

    def account(self, request: ControlRequest) -> object:
        usage = self.pool.usage()
        return {
            "team_id": request.team,
            "team_name": request.team,
            "instance_limit": self.pool.limits.max_per_team,
            "instance_count": self.pool.count(request.team),
            "memory": {"resident": usage.resident, "resident_bytes": usage.resident_bytes, "spilled": usage.spilled},
        }

    def runner_token(self, request: ControlRequest) -> object:
        return {"token": self._auth.runner_token(request.team)}

    # Instances

    def make(self, request: ControlRequest) -> object:
        spec = instance_spec(request.body)
        try:
            record = self.pool.create(request.team, spec, request.request_id)
        except LimitReached as e:
            raise PlatformRefusal(403, _limit(e)) from None
        except DuplicateRequest as e:
            answer = {"error": "duplicate_request_id", "message": str(e), "instance_id": e.instance_id}
            raise PlatformRefusal(409, answer) from None
        return self._shown(record, request)

    def _shown(self, record: InstanceRecord, request: ControlRequest) -> JsonPayload:
        is_world = bool(app_of(record.wanted.app).parts)
        return wire.instance(record, request.base_url, self._auth.login(record.id) if is_world else "")

    def instances(self, request: ControlRequest) -> object:
        _check_profile(request)
        status, run_id = request.one("status"), request.one("run_id")
        found = (
            record
            for record in self.pool.records(request.team)
            if (str(record.state) == status if status else not record.is_over)
            and (run_id is None or record.wanted.run_id == run_id)
        )
        return [self._shown(record, request) for record in found]

    def instance(self, request: ControlRequest) -> object:
        return self._shown(self.pool.record(request.name, request.team), request)

    def close(self, request: ControlRequest) -> object:
        return self._shown(self.pool.close(request.name, request.team), request)

    def close_all(self, request: ControlRequest) -> object:
        """Closes the instances of a run, or with `profile_id=self` all of the team's."""
        run_id = request.one("run_id")
        if run_id is None and not _check_profile(request):
            raise PlatformRefusal(
                400, f"name the run whose instances are to be closed (?run_id=), or ?profile_id={OWN_PROFILE}"
            )
        alive = [record for record in self.pool.records(request.team) if not record.is_over]
        found = [record for record in alive if run_id is None or record.wanted.run_id == run_id]
        return [self._shown(self.pool.close(record.id, request.team), request) for record in found]

    def heartbeat(self, request: ControlRequest) -> object:
        record = self.pool.beat(request.name, request.team)
        beats = None if record.wanted.heartbeat_s is None else int(record.wanted.heartbeat_s)
        return {
            "success": not record.is_over,
            "instance_id": record.id,
            "last_heartbeat": wire.time_text(record.updated_at),
            "deadline_timestamp": None if record.is_over else self.pool.deadline(record),
            "interval_seconds": beats,
        }

    def runs(self, request: ControlRequest) -> object:
        _check_profile(request)
        runs: dict[str, list[InstanceRecord]] = {}
        for record in self.pool.records(request.team):
            if record.wanted.run_id is not None:
                runs.setdefault(record.wanted.run_id, []).append(record)
        answer = (_run(run_id, records) for run_id, records in runs.items())
        return [run for run in answer if run["running_count"] or request.one("active") != "active"]

    # Tasks

    def tasks(self, request: ControlRequest) -> object:
        """Returns the tasks with the given keys, or a page of all that are listed."""
        keys, env_key, data_id = request.query.getlist("task_keys"), request.one("env_key"), request.one("data_id")
        apps = [_app(env_key)] if env_key else list(APPS.values())
        made = [make_task(key) for key in keys] if keys else list(_page(request, apps, data_id))
        made = [one for one in made if env_key in (None, one.app.key) and data_id in (None, one.seed.key)]
        listed = WORLDS * sum(len(app.templates) for app in apps)
        answer = [wire.task(one, request.team, self._source_of(one)) for one in made]
        return {"tasks": answer, "total": len(answer) if keys or data_id else listed}

    def task(self, request: ControlRequest) -> object:
        one = make_task(request.name)
        source = self._source_of(one)
        return {**wire.task(one, request.team, source), "verifier": wire.verifier(str(one.key), source)}

    def keep_task(self, request: ControlRequest) -> object:
        raise PlatformRefusal(
            400, "tasks of this platform follow from their keys and cannot be changed; put your own into a tasks file"
        )


def _page(request: ControlRequest, apps: list[TaskApp], data_id: str | None) -> Iterator[PlatformTask]:
    """Yields ten tasks of each template if an app is named, otherwise one."""
    size = request.count("per_template", TASKS_PER_TEMPLATE if len(apps) == 1 else 1, WORLDS)
    worlds = page_of(request.count("page", 0, WORLDS), size) if data_id is None else page_with(data_id)
    count = len(worlds) * sum(len(app.templates) for app in apps)
    if count > MAX_TASKS:
        raise PlatformRefusal(
            400, f"these are {count} tasks, but at most {MAX_TASKS} can be listed at a time; name an env_key"
        )
    return tasks_in(worlds, apps, FIRST_EVAL if request.one("split") == "eval" else 0)


def instance_spec(body: bytes) -> InstanceSpec:
    request = read_as(body, InstanceRequest, "this is not a request for an instance")
    app = _app(request.env_key)
    for version in (request.env_version, request.data_version):
        if version is not None and version != app.version:
            raise PlatformRefusal(400, f"Version '{version}' not found for '{app.key}': there is {app.version}")
    for name in ("timestamp", "p_error", "avg_latency"):
        if getattr(request, name):
            raise PlatformRefusal(400, f"{name} is not supported; the world's clock and tools cannot be changed")
    if request.image_type not in (None, "standard"):
        raise PlatformRefusal(400, f"there are no images of type {request.image_type!r}; apps have tools, no screens")
    if any(value is not None and not value > 0 for value in (request.ttl_seconds, request.heartbeat_interval)):
        raise PlatformRefusal(400, "ttl_seconds and heartbeat_interval must be positive numbers")
    data = request.data_key or (DEFAULT_DATA if request.seed is None else f"small-{request.seed}")
    seed = seed_named(app, data)
    return InstanceSpec(
        app=app.key,
        data=seed.key,
        version=app.version,
        variables=_variables(request.env_variables or {}, seed.variables["CURRENT_DATE"]),
        ttl_s=request.ttl_seconds,
        heartbeat_s=request.heartbeat_interval,
        run_id=request.run_id,
        region=request.region,
    )


def _variables(given: JsonPayload, today: str) -> dict[str, str]:
    found = {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode() for name, value in given.items()
    }
    if found.get("CURRENT_DATE", today) != today:
        raise PlatformRefusal(400, f"CURRENT_DATE of this world is {today} and cannot be changed; choose other data")
    return found


def _check_profile(request: ControlRequest) -> bool:
    """Whether a profile was named. A team has only its own."""
    named = request.one("profile_id")
    if named not in (None, OWN_PROFILE, request.team):
        raise PlatformRefusal(
            400, f"there is no profile {named[:64]!r}; the only profile_id is {OWN_PROFILE}, all instances of your key"
        )
    return named is not None


def _app(key: str) -> TaskApp:
    try:
        return app_of(key)
    except PlatformError:
        raise PlatformRefusal(400, f"Environment '{key[:64]}' not found: there are {', '.join(APPS)}") from None


def _limit(error: LimitReached) -> JsonPayload:
    return {
        "error_type": "instance_limit_exceeded",
        "message": f"instance limit reached: {error}",
        "running_instances": error.count,
        "instance_limit": error.limit,
    }


def _run(run_id: str, records: list[InstanceRecord]) -> JsonPayload:
    return {
        "run_id": run_id,
        "running_count": sum(not record.is_over for record in records),
        "total_count": len(records),
        "first_created_at": wire.time_text(min(record.created_at for record in records)),
        "last_created_at": wire.time_text(max(record.created_at for record in records)),
    }
