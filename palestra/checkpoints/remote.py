"""Checkpoints of a running server, ours or a hosted one, by the official Tinker client."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import tinker
from tinker.types import Checkpoint

from palestra.checkpoints import CheckpointError, CheckpointNotFound
from palestra.rollouts.policy_sampler import PolicyError, ServerUnreachable
from palestra.rollouts.reachability import check_server
from palestra.util.atomic_files import whole_folder
from palestra.util.tinker_deprecations import ignore_deprecations

ignore_deprecations()

PAGE = 100
TRAINED, EXTERNAL = "/weights/", "/external_weights/"
CHUNK = 1 << 20
NO_KEY = "tml-none"

Progress = Callable[[int, int], None]
"""Called with the bytes that have come and, where the server says it, how many there will be; else 0."""


class CheckpointServerError(CheckpointError, ConnectionError):
    """The server with the checkpoint does not answer."""


class ServerCheckpoints:
    def __init__(self, server: str, key: str | None) -> None:
        self._server = server
        with server_errors(server):
            check_server(server)  # the SDK would try for ever
            self._service = tinker.ServiceClient(base_url=server, api_key=key or NO_KEY)
            self._rest = tinker.RestClient(base_url=server, api_key=key or NO_KEY)

    def list(self) -> list[Checkpoint]:
        """Newest first."""
        found: list[Checkpoint] = []
        with server_errors(self._server):
            while page := self._rest.list_user_checkpoints(limit=PAGE, offset=len(found)).result().checkpoints:
                found += page
        return sorted(found, key=lambda one: one.time, reverse=True)

    def delete(self, address: str) -> None:
        with server_errors(address):
            self._rest.delete_checkpoint_from_tinker_path(address).result()

    def base_models(self) -> list[str]:
        """Names of the models that can be trained there."""
        with server_errors(self._server):
            found = self._service.get_server_capabilities().supported_models
        return [one.model_name for one in found if one.model_name]

    def save_again(self, address: str, name: str) -> tuple[str, str]:
        """Loads a state and saves it under a name, and returns its addresses for training and for sampling."""
        with server_errors(address):
            model = self._service.create_training_client_from_state(address)
            weights = model.save_state(name).result().path
            return weights, model.save_weights_for_sampler(name).result().path

    def download(self, address: str, folder: Path, progress: Progress = lambda _come, _of: None) -> None:
        """Saves the files of a checkpoint. Files of a state that can be trained are made by the server for this."""
        if EXTERNAL in address:
            self._fetch(address, folder, progress)
            return
        if TRAINED not in address:
            raise CheckpointError(f"{address} cannot be downloaded; give a …/weights/… or …/external_weights/… address")
        with server_errors(address):
            model = self._service.create_training_client_from_state(address)
            made = model.save_weights_external(f"export-{secrets.token_hex(8)}").result().path
        try:
            self._fetch(made, folder, progress)
        finally:
            self.delete(made)

    def _fetch(self, address: str, folder: Path, progress: Progress) -> None:
        with server_errors(address), whole_folder(folder) as temporary, httpx.Client(timeout=60) as client:
            urls = self._rest.get_external_weights_urls(address).result().urls
            come = 0
            for name, url in urls.items():
                with client.stream("GET", url) as answer, (temporary / Path(name).name).open("wb") as file:
                    answer.raise_for_status()
                    size = int(answer.headers.get("content-length", 0))
                    for chunk in answer.iter_bytes(CHUNK):
                        come += file.write(chunk)
                        progress(come, size)


@contextmanager
def server_errors(what: str) -> Iterator[None]:
    try:
        yield
    except tinker.NotFoundError as error:
        raise CheckpointNotFound(f"{what}: {error}") from None
    except ServerUnreachable as error:
        raise CheckpointServerError(str(error)) from None
    except PolicyError as error:
        raise CheckpointError(str(error)) from None
    except (tinker.APIConnectionError, httpx.TransportError) as error:
        raise CheckpointServerError(f"{what}: the server does not answer ({error})") from None
    except (tinker.TinkerError, httpx.HTTPStatusError) as error:
        raise CheckpointError(f"{what}: {error}") from None
