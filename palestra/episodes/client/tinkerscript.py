"""A client with the names of AgentJet's, for scripts that were written for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from palestra.episodes.client.api import ApiCall
from palestra.episodes.client.errors import EpisodeClientError, InvalidResult, ServerSilent
from palestra.episodes.client.leases import new_client_id, new_id
from palestra.episodes.client.loop_thread import SHARED
from palestra.episodes.client.retries import RETRY_S, RetryingCalls
from palestra.types.readiness import make_ready
from palestra.types.tinkerscript import CanContinue, ClaimedEpisode, EpisodeBuffer, EpisodeStatus, WorkflowOutput
from palestra.util.json_types import JsonMapping, JsonObject

__all__ = ["EngineError", "EpisodeStatus", "OpenaiBaseUrlAndApiKey", "TinkerScriptClient", "WorkflowOutput"]

log = logging.getLogger(__name__)
T = TypeVar("T")

OFFLINE, BOOTING, ROLLING, SYNCING = "ENGINE.OFFLINE", "ENGINE.BOOTING", "ENGINE.ROLLING", "ENGINE.WEIGHT_SYNCING"
UNKNOWN = "unknown"
NO_MODEL = "reserved_field"
"""Model name of servers that do not name the model."""
POLL_S = 1.0
ENGINE_S = 600.0  # models are loaded meanwhile


class EngineError(EpisodeClientError):
    """The engine is in the wrong state for this call, or did not do it."""


@dataclass(frozen=True, slots=True)
class OpenaiBaseUrlAndApiKey:
    base_url: str
    api_key: str
    model: str
    episode_uuid: str
    task: JsonObject | None = None
    """The task, from a server whose episodes carry theirs; ours do. With a dataset of one's own, its `id` says which
    to play."""
    claim: ClaimedEpisode | None = None
    """The whole answer of the server."""


class TinkerScriptJob(Protocol):
    """A job with a config, such as AgentJetJob."""

    config: Any


class _Done(Struct, kw_only=True):
    success: bool
    error: str = ""
    failure_reason: str = ""


class _Status(Struct, kw_only=True):
    engine_status: str


make_ready(__name__)


class TinkerScriptClient:
    """A TinkerScript client with one client id, shared by all threads that use it. Unlike AgentJet's, it raises
    errors."""

    def __init__(self, server_url: str, key: str | None = None, *, retry_s: float = RETRY_S):
        self.server_url, self.client_uuid = server_url.rstrip("/"), new_client_id()
        self._calls = RetryingCalls(server_url, key, retry_s)
        self._leases: dict[str, str | None] = {}

    # Playing

    def begin_episode(
        self, allow_discard_timeout: float = 60, episode_type: str = "train"
    ) -> tuple[str, OpenaiBaseUrlAndApiKey]:
        """Claims an episode; waits until there is one."""
        refused = ""
        while True:
            response = self._post(
                "/claim_episode",
                ClaimedEpisode,
                client_uuid=self.client_uuid,
                episode_type=episode_type,
                allow_discard_timeout=float(allow_discard_timeout),
                claim_id=new_id(),
            )
            if response.success:
                break
            if response.fail_cause != refused:
                refused = response.fail_cause
                log.info("no episode yet: %s", refused)
            time.sleep(POLL_S)
        self._leases[response.episode_uuid] = response.lease_id
        access = OpenaiBaseUrlAndApiKey(
            response.openai_base_url,
            response.openai_api_key,
            response.model or NO_MODEL,
            response.episode_uuid,
            response.task,
            response,
        )
        return response.episode_uuid, access

    def end_episode(self, episode_uuid: str, workflow_output: object) -> None:
        output = _plain(workflow_output)
        response = self._post("/end_episode", _Done, **self._names(episode_uuid), workflow_output=output)
        self._leases.pop(episode_uuid, None)  # if it was refused, another client has the lease
        if not response.success:
            raise EpisodeClientError(
                f"episode {episode_uuid} was not ended: {response.error or response.failure_reason}"
            )

    def abort_episode(self, episode_uuid: str) -> None:
        """Gives the episode back for another player, without a result."""
        response = self._post("/abort_episode", _Done, **self._names(episode_uuid))
        self._leases.pop(episode_uuid, None)
        if not response.success:
            raise EpisodeClientError(f"episode {episode_uuid} was not given back: {response.failure_reason}")

    def can_continue_episode(self, episode_uuid: str) -> bool:
        """Whether the episode can continue; this also renews the lease."""
        return self._post("/can_continue_episode", CanContinue, **self._names(episode_uuid)).can_continue

    def get_episode_buffer(self) -> list[EpisodeStatus]:
        return self._post("/get_episode_buffer", EpisodeBuffer).buffer

    def _names(self, episode_uuid: str) -> dict[str, str]:
        named = {"client_uuid": self.client_uuid, "episode_uuid": episode_uuid}
        lease_id = self._leases.get(episode_uuid)
        return named if lease_id is None else {**named, "lease_id": lease_id}

    # The engine

    def get_engine_status(self) -> str:
        """The engine's status; `unknown` if the server does not answer."""
        try:
            return SHARED.wait(self._calls.do(ApiCall("GET", "/get_engine_status", _Status), retry_s=0)).engine_status
        except ServerSilent:
            return UNKNOWN

    def sync_train_config(self, job: TinkerScriptJob | JsonMapping | str) -> None:
        """Sends a training config: a job with a `config`, a config, or its YAML."""
        self._require(OFFLINE, "sync_train_config")
        self._succeed("/sync_train_config", yaml_as_string=_yaml_of(job))

    def start_engine(self) -> None:
        """Starts the engine; returns when episodes can be claimed."""
        self._require(OFFLINE, "start_engine")
        self._succeed("/start_engine")
        self._wait_for(ROLLING)

    def auto_sync_train_config_and_start_engine(self, job: TinkerScriptJob | JsonMapping | str) -> None:
        """Sends the config and starts the engine, as far as that is still needed."""
        status = self.get_engine_status()
        if status == OFFLINE:
            self.sync_train_config(job)
            self.start_engine()
        elif status in (BOOTING, SYNCING):
            self._wait_for(ROLLING)
        elif status != ROLLING:
            raise EngineError(f"{self.server_url} is {status}; wait, or call stop_engine() first")

    def stop_engine(self) -> None:
        if self.get_engine_status() != OFFLINE:
            self._succeed("/stop_engine")
            self._wait_for(OFFLINE)

    def _wait_for(self, expected: str) -> None:
        heard_at = time.monotonic()
        while (status := self.get_engine_status()) != expected:
            if expected == ROLLING and status == OFFLINE:
                raise EngineError(f"{self.server_url} is {status} again: the engine did not start; see its log")
            if status != UNKNOWN:
                heard_at = time.monotonic()
            elif time.monotonic() - heard_at > self._calls.retry_s:
                raise ServerSilent(f"{self.server_url} does not answer")
            time.sleep(POLL_S)

    def _require(self, expected: str, what: str) -> None:
        if (status := self.get_engine_status()) != expected:
            raise EngineError(f"{what} needs {expected}, but {self.server_url} is {status}")

    def _succeed(self, path: str, **body: object) -> None:
        response = self._post(path, _Done, **body)
        if not response.success:
            raise EngineError(f"{path}: {response.error or response.failure_reason or 'refused'}")

    def _post(self, path: str, answer: type[T], **body: object) -> T:
        timeout_s = ENGINE_S if path in ("/start_engine", "/stop_engine") else 30.0
        return SHARED.wait(self._calls.do(ApiCall("POST", path, answer, body, timeout_s=timeout_s)))


def _plain(output: Any) -> Any:
    """Converts a pydantic model, a mapping or one of our structs to plain JSON data."""
    if hasattr(output, "model_dump"):
        return output.model_dump()
    if not isinstance(output, Mapping | Struct):
        raise InvalidResult(f"a WorkflowOutput is needed, found {type(output).__name__}")
    return output


def _yaml_of(job: TinkerScriptJob | JsonMapping | str) -> str:
    if isinstance(job, str):
        return job
    import yaml  # imported here: only those who start engines need it, and it is slow to import

    config = job if isinstance(job, Mapping) else job.config
    plain = config if isinstance(config, Mapping) else config.to_dict()
    return yaml.safe_dump(dict(plain), sort_keys=False)
