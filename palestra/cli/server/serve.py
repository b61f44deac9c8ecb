"""`palestra serve`: flags and files become a ServeConfig, which the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click
from msgspec import to_builtins

from palestra.cli.options import config_files
from palestra.cli.output import FAILED, USAGE, fail, needs_extra, one_line_errors, print_json
from palestra.util.amounts import bytes_text, parse_amount
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from palestra.config.serve import ModelConfig


class ServeCommand(click.RichCommand):
    """A command that remembers the order of --model and --name, which click does not."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        ctx.meta["palestra.order"] = [param.name for param in order if param.name in ("model", "name")]
        return super().parse_args(ctx, args)


@click.command(cls=ServeCommand)
@click.option(
    "--model", multiple=True, metavar="DIR_OR_ID", help="A model folder, a cached Hugging Face id, or NAME=DIR."
)
@click.option("--name", multiple=True, help="Name under which the --model before it is served; may be repeated.")
@click.option("--host", help="Address to listen at.  [127.0.0.1]")
@click.option("--port", type=int, help="Port to listen at; 0 for any free port. [8000]")
@click.option("--tls-cert", metavar="FILE", help="PEM file with the certificate: serve HTTPS.  [plain HTTP]")
@click.option("--tls-key", metavar="FILE", help="PEM file with its private key.  [in the file of --tls-cert]")
@click.option("--public-url", metavar="URL", help="Address by which clients reach it through a proxy.")
@click.option("--state", metavar="DIR", help="Folder for the server's state. [.palestra]")
@click.option("--database", metavar="URL", help="sqlite:///… or postgresql://…  [SQLite in the state folder]")
@click.option("--checkpoints", metavar="DIR_OR_URL", help="Folder for checkpoints, or s3://… [in the state folder]")
@click.option("--standby", is_flag=True, help="Wait while another server uses the database; take over when it is gone.")
@click.option("--runs", metavar="DIR", help="Folder of training runs that the dashboard at /ui shows. [runs]")
@click.option("--ray", metavar="ADDRESS", help="Run workers on the nodes of a Ray cluster: auto, or host:port. [here]")
@click.option("--device", help="Device of all models: cpu, cuda, cuda:1 … [auto: a GPU if there is one]")
@click.option("--weights", help="Weights of all models in 8 or 4 bits: fp8, int8, int4, nf4, mxfp4. [as stored]")
@click.option(
    "--agentjet",
    "--tinkerscript",
    "agentjet",
    is_flag=True,
    help="Also listen at port 10086, the default of AgentJet's clients.",
)
@config_files
@click.option("--dry-run", is_flag=True, help="Show which rank goes where and the memory it needs; start nothing.")
@click.option("--memory", metavar="SIZE", help="Memory of each device for --dry-run, such as 80GB. [this machine's]")
@click.option("--json", "as_json", is_flag=True, help="Print the plan of --dry-run as JSON.")
@click.option(
    "--with-parent", is_flag=True, hidden=True, help="Stop when stdin closes; for processes that start this command."
)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.pass_context
def serve(
    ctx: click.Context,
    model: tuple[str, ...],
    name: tuple[str, ...],
    device: str | None,
    weights: str | None,
    agentjet: bool,
    standby: bool,
    files: tuple[str, ...],
    dry_run: bool,
    memory: str | None,
    as_json: bool,
    with_parent: bool,
    overrides: tuple[str, ...],
    **flags: str | int | None,
) -> None:
    """Serve models: training and sampling by Tinker's API. Without --model, it serves Ephebe, the small bundled model.

    Any setting can be given as KEY=VALUE, such as limits.max_models=64 or models.0.replicas=2;
    `palestra config schema serve` lists them all.
    """
    from palestra.config import ConfigError, Override
    from palestra.config.serve import load_serve_config

    for text in overrides:
        if "=" not in text:
            raise fail(f"{text!r}: settings are KEY=VALUE; a model is given as --model {text}", USAGE)
    models = pair_names(ctx.meta["palestra.order"], model, name)
    with one_line_errors(ConfigError):
        given = [Override("models", models, "--model")] if models else []
        last = [Override(key, value, f"--{key.replace('_', '-')}") for key, value in flags.items() if value is not None]
        for key, value in {"device": device, "weights": weights}.items():
            if value is not None:
                last.append(Override(f"models.*.{key}", value, f"--{key}"))
        if agentjet:
            last.append(Override("tinkerscript.enabled", True, "--agentjet"))
        if standby:
            last.append(Override("standby", True, "--standby"))
        config = load_serve_config(files, [*given, *overrides, *last])
    for one in config.models:
        check_folder(one)
    if dry_run:
        if config.ray is not None and not as_json:
            show_nodes(config.ray.address)
        show_plan(config.models, memory, as_json=as_json)
        return
    if memory is not None or as_json:
        raise fail(f"{'--json' if memory is None else '--memory'} belongs to --dry-run", USAGE)
    if config.otlp_endpoint is not None:
        with needs_extra("otel"):
            import palestra.server.core.telemetry.otlp  # noqa: F401
    from palestra.server.listeners import ServeError, open_listeners

    with one_line_errors(ServeError, code=FAILED):
        listeners = open_listeners(config)
    with needs_extra("server"):
        from palestra.server.main import run  # takes seconds
    raise SystemExit(run(config, listeners, with_parent=with_parent))


def show_nodes(address: str) -> None:
    with needs_extra("ray"):
        from palestra.placement.ray_cluster import ClusterNode, cluster_nodes, connect, disconnect

    async def look() -> list[ClusterNode]:
        await connect(address)
        try:
            return await cluster_nodes()
        finally:
            await disconnect()

    with one_line_errors(ConnectionError):
        nodes = asyncio.run(look())
    for node in nodes:
        click.echo(f"node {node.summary}")


def show_plan(models: list[ModelConfig], memory: str | None, *, as_json: bool) -> None:
    with needs_extra("engine"):
        from palestra.memory_plan.model_plan import WAY_TEXTS
        from palestra.memory_plan.serve_plan import by_device, plan_serving
        from palestra.model.errors import ModelError
    with one_line_errors(ModelError, OSError, ValueError):
        plan = plan_serving(models, None if memory is None else parse_amount(memory))
    if as_json:
        print_json(to_builtins(plan) | {"too_full": plan.too_full})
        raise SystemExit(FAILED if plan.too_full else 0)
    for device, ranks in by_device(plan).items():
        total = sum(rank.total_bytes for rank in ranks)
        verdict = "does not fit into" if device in plan.too_full else "of"
        click.echo(f"{device:<10} {bytes_text(total):>10} {verdict} {bytes_text(plan.memory[device])}")
        for rank in ranks:
            click.echo(f"  {rank.model}, rank {rank.rank}")
            for name, size in rank.parts.items():
                click.echo(f"    {name:<36} {bytes_text(size):>10}")
            if rank.offloaded_bytes:
                click.echo(f"    {'beside it, in main memory':<36} {bytes_text(rank.offloaded_bytes):>10}")
            if rank.checkpointing:
                click.echo(f"    {WAY_TEXTS[rank.checkpointing]}")
    if plan.too_full:
        for model, settings in plan.advice.items():
            found = f"it fits with: {' '.join(settings)}" if settings else "choose a smaller model, or larger devices"
            click.echo(f"error: {model} needs more memory than there is; {found}", err=True)
        raise SystemExit(FAILED)


def pair_names(order: Sequence[str], models: Sequence[str], names: Sequence[str]) -> list[JsonObject]:
    """Each --name belongs to the --model before it."""
    next_model, next_name = iter(models), iter(names)
    paired: list[JsonObject] = []
    for option in order:
        if option == "model":
            name, equals, path = (text := next(next_model)).partition("=")
            is_named = bool(equals) and not Path(text).exists()
            paired.append({"path": path, "name": [name]} if is_named else {"path": text})
        elif paired:
            paired[-1].setdefault("name", []).append(next(next_name))
        else:
            raise fail(f"--name {next(next_name)} has no --model before it; type: --model DIR --name NAME", USAGE)
    return paired


def check_folder(model: ModelConfig) -> None:
    if not model.path.is_dir():
        message = f"no such folder: {model.path}; to make a small one to try: palestra model random {model.path}"
        raise fail(message, USAGE)
    if not (model.path / "config.json").is_file():
        raise fail(f"{model.path} is not a model folder: it has no config.json", USAGE)
