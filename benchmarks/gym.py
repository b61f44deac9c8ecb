"""What a rollout costs: agent, model and resources servers with a model that takes no time.

    python benchmarks/gym.py --quick
    python benchmarks/gym.py --json

NeMo Gym's figures were taken elsewhere, where it is installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from harness import Measure, Progress, Report, Row, argument_parser, machine, report, versions
from peers.platform_load import Taken, ask, request, served, take

from palestra.gym.metrics import aggregate

PEERS = Path(__file__).parent / "peers"
STOCK = Path(__file__).parents[1] / ".nemo-gym"
"""NeMo Gym's own server folders, where `make nemo-gym` has put them."""
PACKAGES = ("palestra", "aiohttp", "uvicorn", "uvloop", "httptools", "orjson")
ROUNDS, QUICK_ROUNDS = 5, 2
SECONDS, QUICK_SECONDS = 6.0, 2.0
CLIENTS = 64
TASKS, ROLLOUTS = 1000, 4
PEER = "NeMo Gym, August 2026, elsewhere"
READY = "servers ready"

TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": False,
    }
]
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "How is Oslo?"}], "tools": TOOLS},
    "verifier_metadata": {"expected": "cold"},
}


@dataclass(frozen=True, slots=True)
class Gym:
    """A running one."""

    url: str
    """The agent's."""
    servers: list[psutil.Process]
    everything: list[psutil.Process]
    """Those, the head and whatever keeps them."""
    ready_s: float

    def cpu_s(self) -> float:
        spent = [process.cpu_times() for process in self.servers]
        return sum(one.user + one.system for one in spent)

    def memory_mib(self) -> float:
        """Each page once, however many have it."""
        return sum(process.memory_full_info().pss for process in self.everything) / 2**20


def config(isolation: str, tools: int, with_ids: bool, upstream: str) -> str:
    """JSON, which is YAML. `isolation` may be `stock`: agent and world are NeMo Gym's, unchanged."""
    is_stock = isolation == "stock"
    model = {
        "entrypoint": "app.py",
        "base_url": upstream,
        "api_key": "none",
        "model": f"tools-{tools}-{'ids' if with_ids else 'text'}",
        "return_token_id_information": with_ids,
        "request_prompt_and_generation_token_ids": with_ids,
        "uses_reasoning_parser": False,
    }
    agent = {
        "entrypoint": "app.py",
        "resources_server": {"type": "resources_servers", "name": "weather"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    }
    weather = {"entrypoint": "app.py", "domain": "agent"}
    own = {"isolation": "process" if is_stock else isolation}
    world = "example_single_tool_call" if is_stock else "weather"
    return json.dumps(
        {
            "weather": {"resources_servers": {world: weather | own}},
            "policy_model": {"responses_api_models": {"vllm_model": model | own}},
            "agent": {"responses_api_agents": {"simple_agent": agent | own}},
            "head_server": {"host": "127.0.0.1", "port": 0},
            "gym": {"use_stock": ["simple_agent"] if is_stock else []},
        }
    )


@contextmanager
def running(isolation: str, tools: int, with_ids: bool, upstream: str) -> Iterator[Gym]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gym.yaml"
        file.write_text(config(isolation, tools, with_ids, upstream))
        command = [str(Path(sys.executable).with_name("palestra")), "gym", "run", "-c", str(file)]
        command += ["--search-dir", str(STOCK if isolation == "stock" else PEERS / "gym_world")]
        began = time.perf_counter()
        null = subprocess.DEVNULL
        with subprocess.Popen(command, stdin=null, stdout=null, stderr=subprocess.PIPE, text=True) as process:
            try:
                head = until_ready(process)
                ready_s = time.perf_counter() - began
                yield looked_at(head, process.pid, ready_s)
            finally:
                process.terminate()


def until_ready(process: subprocess.Popen[str]) -> str:
    """The head's address."""
    assert process.stderr is not None
    head, lines = "", []
    for line in process.stderr:
        lines.append(line)
        head = head or next((word.rstrip(";") for word in line.split() if word.startswith("http")), "")
        if READY in line:
            return head
    raise RuntimeError(f"the gym did not start: {''.join(lines[-20:])}")


def looked_at(head: str, pid: int, ready_s: float) -> Gym:
    with urllib.request.urlopen(f"{head}/server_instances", timeout=10) as answer:
        instances: list[dict[str, Any]] = json.load(answer)
    agent = next(one for one in instances if one["server_type"] == "responses_api_agents")
    servers = [psutil.Process(number) for number in {one["pid"] for one in instances}]
    whole = psutil.Process(pid)
    return Gym(agent["url"], servers, [whole, *whole.children(recursive=True)], ready_s)


# Rows


def played(gym: Gym, seconds: float) -> Taken:
    content = request("POST", f"{gym.url}/run", ROW)
    found: Any = ask(gym.url, content)
    if found.get("reward") != 1.0:
        raise RuntimeError(f"what is measured does not work: {str(found)[:500]}")
    return take(gym, [content] * CLIENTS, seconds, is_same=False)


def rollouts(upstream: str, rounds: int, seconds: float, progress: Progress) -> list[Row]:
    kinds = {
        "one tool call, one process": ("shared", 1, False, 1.8, None),
        "one tool call, over HTTP": ("process", 1, False, 6.0, 28.0),
        "token ids, 3 calls, 2 tools, over HTTP": ("process", 2, True, 12.0, 44.0),
    }
    if STOCK.is_dir():
        kinds["one tool call, NeMo Gym's own agent and world"] = ("stock", 1, False, None, 28.0)
    rows: list[Row] = []
    for what, (isolation, tools, with_ids, target, theirs) in kinds.items():
        progress.doing(what)
        with running(isolation, tools, with_ids, upstream) as gym:
            played(gym, seconds / 2)  # warm
            found = [played(gym, seconds) for _ in range(rounds)]
            memory = gym.memory_mib()
        cpu = Measure(tuple(one.server_cpu_ms for one in found))
        rate = Measure(tuple(one.per_second for one in found))
        rows.append(beside(f"CPU per rollout, {what}", "ms", cpu, target, theirs))
        least = 350.0 if isolation == "shared" else None
        rows.append(Row(f"rollouts, {what}", "rollouts/s", rate, target_value=least))
        if tools == 1 and isolation != "stock":
            rows.append(beside(f"memory, {what}", "MiB", Measure((memory,)), 400.0, 3200.0))
    return rows


def starts(upstream: str, rounds: int) -> list[Row]:
    found: list[Row] = []
    for isolation, where in (("shared", "one process"), ("process", "a process each")):
        taken: list[float] = []
        for _ in range(rounds):
            with running(isolation, 1, False, upstream) as gym:
                taken.append(gym.ready_s)
        found.append(beside(f"start to ready, 3 servers, {where}", "s", Measure(tuple(taken)), 3.0, 74.0))
    return found


def aggregation(rounds: int) -> Row:
    usage = {"input_tokens": 400, "output_tokens": 60, "total_tokens": 460}
    rows = [
        {"_ng_task_index": task, "_ng_rollout_index": n, "reward": float(n % 2), "response": {"usage": usage}}
        for task in range(TASKS)
        for n in range(ROLLOUTS)
    ]
    taken: list[float] = []
    for _ in range(rounds):
        began = time.process_time()
        aggregate(rows)
        taken.append(1000 * (time.process_time() - began) / TASKS)
    return beside(f"aggregation per task of {ROLLOUTS} rollouts", "ms", Measure(tuple(taken)), 0.1, 6.7)


def beside(what: str, unit: str, ours: Measure, target: float | None, theirs: float | None) -> Row:
    peer = None if theirs is None else Measure((theirs,))
    return Row(what, unit, ours, PEER if peer else None, peer, target_value=target, less_is_better=True)


def main() -> None:
    args = argument_parser("gym", (__doc__ or "").partition("\n")[0]).parse_args()
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    seconds = QUICK_SECONDS if args.quick else SECONDS
    progress = Progress()
    with served([sys.executable, str(PEERS / "gym_stub.py")]) as stub:
        rows = rollouts(stub.url, rounds, seconds, progress)
        progress.doing("starting")
        rows += starts(stub.url, rounds)
    rows.append(aggregation(rounds))
    progress.done()
    notes = [
        f"{CLIENTS} clients; CPU is that of agent, model and resources servers; clients and endpoint run beside them",
        "NeMo Gym: 28 ms and 41 to 48 ms per rollout, 163 s for a first start, 24 processes",
        "its own agent and world: unchanged, with our stand-in for what they import, where `make nemo-gym` put them",
    ]
    report(Report("gym", machine(), versions(PACKAGES), rows, notes), json_line=args.json)


if __name__ == "__main__":
    main()
