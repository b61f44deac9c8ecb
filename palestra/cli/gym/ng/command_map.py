"""Maps NeMo Gym's commands to ours, and names those without a counterpart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from palestra.cli.gym.ng.options import (
    CONCURRENCY,
    CONFIG,
    HEAD,
    INPUTS,
    JSON,
    LIMIT,
    MODEL_TYPE,
    NO_HEALTH_CHECK,
    OUTPUT,
    RESOURCES_SERVER,
    RESUME,
    ROLLOUTS,
    SEARCH_DIR,
    SOURCES,
    MappedOption,
    absent,
    each_glob,
    flag,
    metrics_file,
    nothing,
    same,
    server_name,
    split_of_mode,
)


@dataclass(frozen=True, slots=True)
class CommandMapping:
    about: str
    ours: tuple[str, ...]
    options: tuple[MappedOption, ...] = ()
    more: tuple[str, ...] = ()
    """Said in any case."""
    names: Callable[[list[str]], list[str]] | None = None
    """What becomes of arguments that are no KEY=VALUE; None: there are none."""


def as_they_are(names: list[str]) -> list[str]:
    return names


def matching(names: list[str]) -> list[str]:
    return [f"--matching={name}" for name in names]


def kind_and_text(names: list[str]) -> list[str]:
    return [*names[:-1], *matching(names[-1:])]


SCAFFOLDS = ("--environment", "--benchmark", "--profile", "--reuse-verifier", "--reward-range")
COMPARED = ("--baseline-agg-metrics", "--candidates-agg-metrics", "--agent", "--baseline-agent", "--candidate-agents")
FILTERS = ("--domain", "--kind", "--modality", "--licensing", "--status", "--lifecycle")
DATASETS = "download files with Hugging Face's `hf`, and join them: palestra gym datasets -c FILE -o DIR"
SERVER = MappedOption(("--resources-server",), server_name, "The server's name.", key="entrypoint")
COLLECTING = (
    MappedOption(("--agent", "-a"), same("--agent"), "Agent for rows that name none."),
    MappedOption(("--input", "-i"), same("--input"), "JSON lines file with the tasks."),
    OUTPUT,
    LIMIT,
    MappedOption(("--num-repeats",), same("--repeats"), "Number of rollouts of each task."),
    absent("--interleave-repeats", "--num-repeats, whose rollouts are all played at once", is_flag=True),
    CONCURRENCY,
    MappedOption(("--prompt-config",), same("--prompt-config"), "Prompt template."),
    MappedOption(("--temperature",), same("--temperature"), "Of sampling."),
    MappedOption(("--top-p",), same("--top-p"), "Of sampling."),
    MappedOption(("--max-output-tokens",), same("--max-output-tokens"), "Maximum tokens of one answer."),
    RESUME,
    MappedOption(("--disable-aggregation",), flag("--no-metrics"), "No metrics.", is_flag=True),
    *NO_HEALTH_CHECK,
    HEAD,
)
COMMANDS = {
    "env start": CommandMapping("Start the servers.", ("gym", "run"), SOURCES),
    "env prefetch": CommandMapping("Build the servers' environments.", ("gym", "run"), SOURCES, more=("dry_run=true",)),
    "env resolve": CommandMapping("Show the merged config.", ("gym", "resolve"), SOURCES),
    "env status": CommandMapping("Show the servers of a running gym.", ("gym", "status"), (JSON, HEAD)),
    "env test": CommandMapping(
        "Test a server's folder.",
        ("gym", "test"),
        (
            SERVER,
            SEARCH_DIR,
            absent("--all", "one server after another, by name", is_flag=True),
            absent("--update-expected", "the tests of the server's folder", is_flag=True),
            absent("--kind", "the name of a server"),
        ),
        names=as_they_are,
    ),
    "env init": CommandMapping(
        "Make a resources server.",
        ("gym", "new"),
        (SERVER, *(absent(name, "--resources-server NAME") for name in SCAFFOLDS)),
    ),
    "eval run": CommandMapping(
        "Start a gym and play its datasets; with --no-serve, play a file through a running gym.",
        ("gym", "collect"),
        (*SOURCES, *COLLECTING),
    ),
    "eval aggregate": CommandMapping(
        "Compute metrics over several files.",
        ("gym", "aggregate"),
        (
            CONFIG,
            MappedOption(
                ("--input-glob", "-i"),
                each_glob,
                "Files of rollouts, as patterns separated by commas.",
                key="input_glob",
            ),
            MappedOption(
                ("--output", "-o"), metrics_file, "The metrics are written beside it.", key="output_jsonl_fpath"
            ),
            *NO_HEALTH_CHECK,
            HEAD,
        ),
    ),
    "eval profile": CommandMapping(
        "Show how hard each task is.",
        ("gym", "profile"),
        (
            INPUTS,
            ROLLOUTS,
            MappedOption(
                ("--allow-partial-rollouts",),
                flag("--partial"),
                "Go on although some rows have no result.",
                key="allow_partial_rollouts",
                is_flag=True,
            ),
        ),
    ),
    "eval reverify": CommandMapping(
        "Grade stored rollouts again.",
        ("gym", "reverify"),
        (
            *SOURCES,
            INPUTS,
            ROLLOUTS,
            OUTPUT,
            CONCURRENCY,
            LIMIT,
            RESUME,
            *(
                MappedOption((f"--{name}",), flag(f"--{name}"), key=name.replace("-", "_"), is_flag=True)
                for name in ("force", "overwrite", "judge-failed-only", "append")
            ),
            MappedOption(
                ("--disable-aggregation",),
                nothing,
                "Accepted, but no report is made.",
                key="disable_aggregation",
                is_flag=True,
            ),
            absent("--input-format", "--rollouts FILE with a collection's own rows"),
            absent("--atif-manifest", "--rollouts FILE with a collection's own rows"),
            HEAD,
        ),
    ),
    "eval compare": CommandMapping(
        "Compare two collections of the same tasks.",
        ("gym", "compare"),
        (
            MappedOption(("--baseline",), lambda value: [value], "Rollouts.", key="baseline_rollouts_jsonl_fpath"),
            MappedOption(("--candidates",), lambda value: [value], "Rollouts.", key="candidate_rollouts_jsonl_fpaths"),
            *(
                absent(name, "--baseline FILE --candidates FILE, which compares their rollouts task by task")
                for name in COMPARED
            ),
            absent("--output-dir", "what is printed, with --json for programs"),
            absent("--report-format", "what is printed, with --json for programs"),
            JSON,
        ),
    ),
    "dataset collate": CommandMapping(
        "Check and join datasets.",
        ("gym", "datasets"),
        (
            CONFIG,
            RESOURCES_SERVER,
            MODEL_TYPE,
            SEARCH_DIR,
            MappedOption(("--mode",), split_of_mode, "train_preparation or example_validation.", key="mode"),
            MappedOption(("--output-dir",), same("--output"), "Folder.", key="output_dirpath"),
            absent("--download", DATASETS, is_flag=True),
            MappedOption(
                ("--overwrite-metrics-conflicts",),
                flag("--overwrite-statistics"),
                key="overwrite_metrics_conflicts",
                is_flag=True,
            ),
        ),
    ),
    **{
        f"list {kind}": CommandMapping(
            f"The {kind} that there are.",
            ("gym", "list", kind),
            (JSON, SEARCH_DIR, *(absent(name, "a part of the name") for name in FILTERS)),
            names=matching,
        )
        for kind in ("benchmarks", "environments", "agents", "models", "resources-servers")
    },
    "search": CommandMapping(
        "Those with a text in their name.", ("gym", "list"), (JSON, SEARCH_DIR), names=kind_and_text
    ),
}
ABSENT = {
    "env validate": "palestra gym resolve -c FILE, which reports every mistake",
    "env packages": "palestra gym run -c FILE dry_run=true, which builds the environments and says where",
    "env publish": "palestra gym test NAME",
    "env schema": "palestra gym test NAME, which seeds every example row",
    "eval prepare": "run the benchmark's own script: python benchmarks/NAME/prepare.py",
    "eval health-check": "palestra gym profile --rollouts FILE",
    "eval export": "the rollouts themselves, JSON lines: palestra gym collect -o FILE",
    "eval submit": "palestra gym run … ray_head_node_address=HOST:PORT, for a cluster",
    "dataset render": "palestra gym collect --prompt-config FILE, which keeps the rows as they were played",
    "dataset upload": DATASETS,
    "dataset download": DATASETS,
    "dataset rm": DATASETS,
    "dataset migrate": DATASETS,
    "dev test": "make test",
    "reinstall": "pip install --upgrade 'palestra[gym]'",
}
"""The nearest command, by the name of each absent one."""
OLD_NAMES = {
    "run": "env start",
    "test": "env test",
    "test_all": "env test --all",
    "dev_test": "dev test",
    "init_resources_server": "env init",
    "list_benchmarks": "list benchmarks",
    "prepare_benchmark": "eval prepare",
    "collect_rollouts": "eval run --no-serve",
    "e2e_collect_rollouts": "eval run",
    "aggregate_rollouts": "eval aggregate",
    "materialize_prompts": "dataset render",
    "reward_profile": "eval profile",
    "prepare_data": "dataset collate",
    "upload_dataset_to_gitlab": "dataset upload",
    "upload_dataset_to_hf": "dataset upload",
    "download_dataset_from_gitlab": "dataset download",
    "download_dataset_from_hf": "dataset download",
    "gitlab_to_hf_dataset": "dataset migrate",
    "delete_dataset_from_gitlab": "dataset rm",
    "dump_config": "env resolve",
    "validate": "env validate",
    "status": "env status",
    "pip_list": "env packages",
    "help": "--help",
    "version": "--version",
    "reinstall": "reinstall",
}
"""What came after `ng_` or `nemo_gym_`."""
