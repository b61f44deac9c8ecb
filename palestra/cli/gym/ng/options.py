"""An option of a command of NeMo Gym's, and what it is called here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import rich_click as click

from palestra.cli.gym.ng.collecting import RUNNING
from palestra.gym.collect.files import OutputFiles
from palestra.gym.search_folders import CatalogKind

Arguments = Callable[[str], list[str]]
"""What its value becomes on our command line."""


@dataclass(frozen=True, slots=True)
class MappedOption:
    names: tuple[str, ...]
    ours: Arguments
    about: str = ""
    key: str | None = None
    """The setting that says the same: `+agent_name=…` for `--agent`."""
    is_flag: bool = False
    is_multiple: bool = False
    selects: CatalogKind | None = None
    """The kind of config that the option's value names."""


def same(option: str) -> Arguments:
    return lambda value: [f"{option}={value}"]


def flag(option: str) -> Arguments:
    return lambda value: [option] if value.lower() == "true" else []


def nothing(_: str) -> list[str]:
    """Returns no arguments, for an option that asks for what is always so here."""
    return []


def absent(name: str, nearest: str, *, is_flag: bool = False) -> MappedOption:
    """An option that has no counterpart; to use it is a mistake that names the nearest."""

    def refuse(_: str) -> list[str]:
        raise click.UsageError(f"{name} has no counterpart in Palestra; the nearest: {nearest}")

    return MappedOption((name,), refuse, f"Not supported: {nearest}.", is_flag=is_flag)


def server_name(value: str) -> list[str]:
    return [value.removeprefix("resources_servers/")]


def each_glob(value: str) -> list[str]:
    return [f"--input={one.strip()}" for one in value.split(",")]


def metrics_file(value: str) -> list[str]:
    """Theirs names the merged rollouts, and puts the metrics beside them."""
    return [f"--output={OutputFiles(Path(value)).metrics}"]


def split_of_mode(value: str) -> list[str]:
    return ["--split=example"] if value == "example_validation" else []


def selector(name: str, kind: CatalogKind) -> MappedOption:
    about = "Use the config of this name; NAME/FLAVOUR for another in the same folder."
    return MappedOption((name,), same("--config"), about, is_multiple=True, selects=kind)


CONFIG = MappedOption(("--config",), same("--config"), "Config file; may be repeated.", is_multiple=True)
SEARCH_DIR = MappedOption(
    ("--search-dir",), same("--search-dir"), "Folder to search first; may be repeated.", is_multiple=True
)
RESOURCES_SERVER = selector("--resources-server", CatalogKind.RESOURCES_SERVERS)
MODEL_TYPE = selector("--model-type", CatalogKind.MODELS)
ALLOW_PAIRING = MappedOption(("--allow-unsupported-pairing",), nothing, "Nothing is refused here.", is_flag=True)
SOURCES = (
    CONFIG,
    selector("--benchmark", CatalogKind.BENCHMARKS),
    selector("--environment", CatalogKind.ENVIRONMENTS),
    RESOURCES_SERVER,
    MODEL_TYPE,
    selector("--agent-type", CatalogKind.AGENTS),
    ALLOW_PAIRING,
    SEARCH_DIR,
    MappedOption(("--model", "-m"), same("--model"), "Name of the policy model."),
    MappedOption(("--model-url",), same("--model-url"), "Address at which it is served."),
    MappedOption(("--model-api-key",), same("--model-api-key"), "Its key."),
)
HEAD = MappedOption(("--head",), same(RUNNING), "Address of a running gym; ++head_server.port=N means the same.")
JSON = MappedOption(("--json",), flag("--json"), "Print JSON.", key="json", is_flag=True)
OUTPUT = MappedOption(("--output", "-o"), same("--output"), "Output file.", key="output_jsonl_fpath")
CONCURRENCY = MappedOption(
    ("--concurrency",), same("--concurrency"), "Number of rollouts played at a time.", key="num_samples_in_parallel"
)
LIMIT = MappedOption(("--limit",), same("--limit"), "Play only this number of rows, from the beginning.", key="limit")
RESUME = MappedOption(
    ("--resume",), flag("--resume"), "Continue an existing output.", key="resume_from_cache", is_flag=True
)
INPUTS = MappedOption(("--inputs",), same("--input"), "Materialized inputs.", key="materialized_inputs_jsonl_fpath")
ROLLOUTS = MappedOption(("--rollouts",), same("--rollouts"), "Stored rollouts.", key="rollouts_jsonl_fpath")
NO_HEALTH_CHECK = (
    MappedOption(("--no-health-check",), nothing, "There is none here.", key="disable_health_check", is_flag=True),
    MappedOption(("--health-check-workers",), nothing, "There is no health check.", key="health_check_workers"),
    MappedOption(("--health-check-ignore",), nothing, "There is no health check.", key="health_check_ignored_checks"),
)
