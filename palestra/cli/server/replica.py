"""`palestra replica`: joins a running server as one of its samplers.

Owns: arguments, joining by HTTP, the config of the engine. Never touches: samples; the engine runs in this process.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import rich_click as click

from palestra.cli.options import renamed_option, server_options
from palestra.cli.output import FAILED, USAGE, fail, needs_extra, one_line_errors
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    import httpx

ANSWER_S = 120.0  # the server may have to read its own model first
ASK_AGAIN_S = 1.0


@click.command()
@server_options(help="Address of the server whose models are sampled.")
@click.option(
    "--model", required=True, metavar="DIR_OR_ID", help="The base model: a folder, or a cached Hugging Face id."
)
@click.option("--name", help="Name under which the server has the model. [the only one it has]")
@click.option("--device", default="auto", help="Device: cpu, cuda, cuda:1 … [auto: a GPU if there is one]")
@click.option("--threads", type=click.IntRange(1), help="CPU threads to compute with. [torch decides]")
@click.option("--cache-tokens", type=click.IntRange(1), help="Size of the KV cache in tokens. [by the memory there is]")
@click.option("--state", metavar="DIR", help="Folder for the adapters it is sent. [a temporary one]")
@renamed_option(
    "--wait",
    "wait_s",
    old="--wait-s",
    metavar="SECONDS",
    type=click.FloatRange(1),
    default=600.0,
    show_default=True,
    help="Seconds without the server after which it ends.",
)
def replica(
    server: str,
    key: str | None,
    model: str,
    name: str | None,
    device: str,
    threads: int | None,
    cache_tokens: int | None,
    state: str | None,
    wait_s: float,
) -> None:
    """Sample for a running server, on this machine or another.

    The server must have been started with replica_port=PORT, and the model with models.N.replicas=0 or more. The key
    needs the right `replica`. Adapters come over an encrypted link; no folder is shared. Ctrl-C or SIGTERM: it finishes
    the samples it has, and leaves.
    """
    with one_line_errors(ValueError, ConnectionError):
        folder = find_model(model)
        joined = join(server, key, folder, name, wait_s)
    given = {"device": device, "threads": threads, "cache_tokens": cache_tokens, "server_timeout_s": wait_s}
    click.echo(f"joining {server} as a replica of {joined['base_model']}", err=True)
    with tempfile.TemporaryDirectory(prefix="palestra-replica-") as temporary:
        os.environ["PALESTRA_WORKER"] = engine_config(server, joined, folder, state or temporary, given)
        with needs_extra("engine"):
            from palestra.engine.__main__ import main
        raise SystemExit(main())


def find_model(model: str) -> Path:
    """Raises ValueError if there is none."""
    from palestra.config.bundled import bundled_model
    from palestra.util.hugging_face import find_in_cache, is_hub_id

    folder = bundled_model(model) or (find_in_cache(model) if is_hub_id(model) else Path(model).resolve())
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")
    return folder


def join(server: str, key: str | None, folder: Path, name: str | None, wait_s: float) -> JsonObject:
    """Asks the server for admission, and waits for one that does not answer yet. Raises ConnectionError if it never
    does."""
    import httpx

    from palestra import __version__
    from palestra.util.model_fingerprint import model_fingerprint

    body = {"base_model": name, "fingerprint": model_fingerprint(folder), "version": __version__}
    until, is_told = time.monotonic() + wait_s, False
    while True:
        try:
            got = httpx.post(
                f"{server.rstrip('/')}/engine/replicas", json=body, headers={"X-API-Key": key or ""}, timeout=ANSWER_S
            )
        except httpx.TransportError as e:
            said = str(e)
        else:
            if got.is_success:
                return got.json()
            said = _detail(got)
            if got.status_code not in (502, 503):
                raise fail(f"{server} refuses this replica: {said}", USAGE if got.status_code in (400, 404) else FAILED)
        if time.monotonic() > until:
            raise ConnectionError(f"{server} does not answer ({said})")
        if not is_told:
            is_told = True
            click.echo(f"waiting for {server} ({said})", err=True)
        time.sleep(ASK_AGAIN_S)


def _detail(got: httpx.Response) -> str:
    try:
        return str(got.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"status {got.status_code}"


def engine_config(server: str, joined: JsonObject, folder: Path, state: str, given: JsonObject) -> str:
    import msgspec

    from palestra.types.engine import ReplicaTicket, WorkerConfig

    host = urlsplit(server).hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    ticket = ReplicaTicket(
        replica_id=joined["replica_id"],
        base_model=joined["base_model"],
        signature=joined["signature"],
        key_id=joined["key_id"],
    )
    fields = joined["settings"] | given
    config = {
        "address": f"tcp://{host}:{joined['port']}",
        "model": str(folder),
        "state": state,
        "role": "sampler",
        "server_key": joined["server_key"],
        "ticket": ticket,
        **fields,
    }
    return msgspec.json.encode(msgspec.convert(msgspec.to_builtins(config), WorkerConfig)).decode()
