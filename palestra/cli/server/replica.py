"""`palestra replica`: joins a running server as one of its samplers."""

from __future__ import annotations

import os
import tempfile

import rich_click as click

from palestra.cli.options import renamed_option, server_options
from palestra.cli.output import needs_extra, one_line_errors


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
    with needs_extra("engine"):
        from palestra.config.bundled import find_model
        from palestra.server.replicas.joining import JoinRefused, engine_config, join
    with one_line_errors(ValueError, ConnectionError, JoinRefused):
        folder = find_model(model).resolve()
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} is not a model folder: it has no config.json")
        joined = join(server, key, folder, name, wait_s, lambda line: click.echo(line, err=True))
    given = {"device": device, "threads": threads, "cache_tokens": cache_tokens, "server_timeout_s": wait_s}
    click.echo(f"joining {server} as a replica of {joined.base_model}", err=True)
    with tempfile.TemporaryDirectory(prefix="palestra-replica-") as temporary:
        os.environ["PALESTRA_WORKER"] = engine_config(server, joined, folder, state or temporary, given)
        with needs_extra("engine"):
            from palestra.engine.__main__ import main
        raise SystemExit(main())
