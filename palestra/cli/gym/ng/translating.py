"""Translates the arguments of a command of NeMo Gym's to those of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import rich_click as click

from palestra.cli.gym.ng.collecting import collect_arguments, head_arguments
from palestra.cli.gym.ng.command_map import CommandMapping
from palestra.cli.gym.ng.options import CONFIG, HEAD, MappedOption
from palestra.gym.config.values import GymOverride
from palestra.gym.search_folders import config_named, search_roots
from palestra.util.json_types import JsonMapping, JsonObject

Typed = JsonMapping
"""Values by the name of the option, with underscores."""
Settings = Mapping[str, GymOverride]
"""Settings by their text. Their own `text` is for messages and has no secrets."""


def arguments_of(mapping: CommandMapping, typed: Typed, rest: Sequence[str]) -> list[str]:
    """`rest` is what was no option. Raises UsageError, and GymConfigError for a name that stands for no config."""
    names = [text for text in rest if "=" not in text and not text.startswith("~")]
    if names and mapping.names is None:
        raise click.UsageError(f"{names[0]!r}: settings are KEY=VALUE")
    made = [*mapping.more, *_options(mapping.options, typed), *(mapping.names(names) if mapping.names else [])]
    settings = {text: GymOverride.parse(text) for text in rest if text not in names}
    return [*made, *_settings(mapping, settings, made)]


def collection_of(mapping: CommandMapping, typed: Typed, rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments of `gym datasets`, or none, and of `gym collect`, for `eval run`."""
    given = {text: GymOverride.parse(text) for text in rest}
    made = [*_options(mapping.options, typed), *_configs(given)]
    settings = [text for text, one in given.items() if one.key not in ("config_paths", "split")]
    has_config = any(one.startswith("--config=") for one in made)
    if typed["no_serve"]:
        if has_config:
            raise click.UsageError("--no-serve uses a running gym, which has its config; leave out the config here")
        return [], collect_arguments([*made, *settings])
    if not has_config:
        raise click.UsageError("give --config FILE for a gym to start, or --no-serve for a running one")
    collect = collect_arguments([*made, *settings], is_started=True)
    if any(one.startswith("--input") for one in collect):
        return [], collect
    split = typed["split"] or next((one.value for one in given.values() if one.key == "split"), None)
    output = _value(collect, "--output")
    if split is None or output is None:
        raise click.UsageError("give --output FILE, and --split train, validation or benchmark, or --input FILE")
    folder = Path(output).with_suffix("") / "preprocessed_datasets"
    sources = [one for one in made if one.startswith(("--config=", "--search-dir=", "--model"))]
    own = [text for text in settings if text in collect]
    datasets = [*sources, *own, f"--output={folder}", f"--split={split}"]
    return datasets, [*collect, f"--input={folder / split}.jsonl"]


def _options(options: Sequence[MappedOption], typed: Typed) -> Iterator[str]:
    roots = search_roots(Path(one) for one in typed.get("search_dir") or ())
    for option in options:
        given = typed[parameter_name(option)]
        for value in given if option.is_multiple else [given]:
            if value not in (None, False):
                text = "true" if value is True else str(value)
                yield from option.ours(config_named(option.selects, text, roots) if option.selects else text)


def _settings(mapping: CommandMapping, settings: Settings, made: list[str]) -> Iterator[str]:
    by_key = {one.key: one for one in mapping.options if one.key is not None}
    configs = list(_configs(settings))
    yield from configs
    is_running = HEAD in mapping.options and not any(one.startswith("--config=") for one in (*made, *configs))
    head: JsonObject = {}
    for text, one in settings.items():
        if one.key == "config_paths":
            continue
        if one.key in by_key:
            yield from by_key[one.key].ours(_text(one.value))
        elif is_running and one.key.startswith("head_server."):
            head.setdefault("head_server", {})[one.key.partition(".")[2]] = one.value
        elif CONFIG in mapping.options and not is_running:
            yield text
        else:
            known = ", ".join([*by_key, *(["head_server.port"] if HEAD in mapping.options else [])])
            raise click.UsageError(f"{one.key}: not a setting of this command; there are: {known or 'none'}")
    yield from head_arguments(head)


def _configs(settings: Settings) -> Iterator[str]:
    listed = [one.value for one in settings.values() if one.key == "config_paths"]
    yield from (f"--config={path}" for value in listed for path in (value if isinstance(value, list) else [value]))


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(arguments: Sequence[str], name: str) -> str | None:
    """The value of an option, `--name=value` or `--name value`."""
    joined = [one.removeprefix(f"{name}=") for one in arguments if one.startswith(f"{name}=")]
    return joined[0] if joined else arguments[arguments.index(name) + 1] if name in arguments else None


def parameter_name(option: MappedOption) -> str:
    return option.names[0].removeprefix("--").replace("-", "_")
