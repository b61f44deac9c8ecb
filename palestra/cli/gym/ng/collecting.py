"""`ng_run` and `ng_collect_rollouts`, and the settings of a collection as options of ours."""

from __future__ import annotations

import json
import sys

import rich_click as click

from palestra.cli.app import main
from palestra.cli.output import needs_extra, one_line_errors
from palestra.util.json_types import JsonMapping, JsonObject
from palestra.util.suggest import did_you_mean

OPTIONS = {
    "agent_name": "--agent",
    "input_jsonl_fpath": "--input",
    "output_jsonl_fpath": "--output",
    "limit": "--limit",
    "num_repeats": "--repeats",
    "num_samples_in_parallel": "--concurrency",
    "prompt_config": "--prompt-config",
}
FLAGS = {"num_repeats_add_seed": "--seeds", "resume_from_cache": "--resume", "disable_aggregation": "--no-metrics"}
PARAMS = "responses_create_params"
HEAD = "head_server"
RUNNING = "--server"
"""Our option for the address of a running gym."""
IGNORED = ("upload_rollouts_to_wandb",)


def ng_run() -> None:
    """`ng_run "+config_paths=[…]"`."""
    main(["gym", "run", *sys.argv[1:]], prog_name="palestra")


def ng_collect_rollouts() -> None:
    """`ng_collect_rollouts +agent_name=… +input_jsonl_fpath=… +output_jsonl_fpath=…`."""
    main(["gym", "collect", *collect_arguments(sys.argv[1:])], prog_name="palestra")


def collect_arguments(overrides: list[str], *, is_started: bool = False) -> list[str]:
    """Translates their settings into our options; our own options, `--name=value`, pass unchanged. As with theirs, an
    existing output is replaced unless it is resumed. `is_started`: the gym is started for this command, so all other
    settings are the gym's."""
    with needs_extra("gym"):
        from palestra.gym.config.values import GymOverride
        from palestra.gym.errors import GymConfigError
    made: list[str] = []
    params: JsonObject = {}
    head: JsonObject = {}
    with one_line_errors(GymConfigError, click.UsageError):
        texts = iter(overrides)
        for text in texts:
            if text == "--head":
                made.append(f"{RUNNING}={next(texts, '')}")
                continue
            if text.startswith("-"):
                made.append(text.replace("--head=", f"{RUNNING}="))
                continue
            one = GymOverride.parse(text)
            if is_started and not _is_of_collection(one.key):
                made.append(text)
            elif one.key.partition(".")[0] == HEAD:
                _put(head, one.key.split("."), one.value)
            else:
                made += _option(one.key, one.value, params)
        made += head_arguments(head)
    if params:
        made += ["--params", json.dumps(params)]
    return made if "--resume" in made else [*made, "--overwrite"]


def head_arguments(settings: JsonMapping) -> list[str]:
    """The option that names the running gym, from `head_server.port` and `head_server.host`; empty if these are not
    set."""
    found = settings.get(HEAD)
    if not found:
        return []
    port = found.get("port", 11000) if isinstance(found, dict) and found.keys() <= {"host", "port"} else None
    if not isinstance(port, int):
        raise click.UsageError(f"{HEAD} is {found!r}, but it must have a host and a port, as in ++{HEAD}.port=9500")
    return [f"{RUNNING}=http://{found.get('host') or '127.0.0.1'}:{port}"]


def _is_of_collection(key: str) -> bool:
    return key in OPTIONS or key in FLAGS or key in IGNORED or key.partition(".")[0] == PARAMS


def _option(key: str, value: object, params: JsonObject) -> list[str]:
    if value is None or key in IGNORED:
        return []
    if key in FLAGS:
        return [FLAGS[key]] if value else []
    if key == PARAMS and isinstance(value, dict):
        params |= value
        return []
    if key.startswith(f"{PARAMS}."):
        _put(params, key.split(".")[1:], value)
        return []
    if key not in OPTIONS:
        known = [*OPTIONS, *FLAGS, PARAMS]
        hint = did_you_mean(key, known)
        raise click.UsageError(f"{key} is not a setting of a collection; {hint}")
    text = ",".join(f"{name}={count}" for name, count in value.items()) if isinstance(value, dict) else str(value)
    return [OPTIONS[key], text]


def _put(params: JsonObject, path: list[str], value: object) -> None:
    for name in path[:-1]:
        params = params.setdefault(name, {})
        if not isinstance(params, dict):
            raise click.UsageError(f"{PARAMS}.{'.'.join(path)}: {name} already has a value")
    params[path[-1]] = value
