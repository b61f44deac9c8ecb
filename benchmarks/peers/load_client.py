"""A process with the official SDK that has many samples in flight, or many idle sessions.

    python load_client.py samples URL FIRST COUNT PROMPT_TOKENS GROUP
    python load_client.py sessions URL COUNT

The key is in TINKER_API_KEY. It prints one line of JSON when it has begun, and one with what it found at its end;
sessions end when stdin does.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from concurrent.futures import as_completed
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"
sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]

import tinker  # noqa: E402
from fake_engine import identity  # noqa: E402
from tinker import types  # noqa: E402


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def samples(url: str, first: int, count: int, prompt_tokens: int, group: int) -> None:
    """`group` samples have the same prompt."""
    service = tinker.ServiceClient(base_url=url)
    model = next(m.model_name for m in service.get_server_capabilities().supported_models if m.model_name)
    sampler = service.create_sampling_client(base_model=model)
    say(ready=True)
    sys.stdin.readline()
    started, futures = time.perf_counter(), {}
    for number in range(first, first + count):
        prompt = types.ModelInput.from_ints([(number // group * 7 + i) % 4096 for i in range(prompt_tokens)])
        params = types.SamplingParams(max_tokens=2, seed=number)
        futures[sampler.sample(prompt, 1, params)] = number
    answers: Counter[tuple[int, ...]] = Counter()
    wrong, failed, first_error = 0, 0, ""
    for future in as_completed(futures):
        number = futures.pop(future)
        try:
            (sequence,) = future.result().sequences
        except Exception as e:
            failed, first_error = failed + 1, first_error or f"{type(e).__name__}: {e}"[:300]
            continue
        wrong += sequence.tokens != identity(number)
        answers[tuple(sequence.tokens)] += 1
    say(
        answered=answers.total(),
        distinct=len(answers),
        wrong=wrong,
        failed=failed,
        first_error=first_error,
        seconds=time.perf_counter() - started,
        cpu_s=time.process_time(),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    service.close("success").result(timeout=60)


def sessions(url: str, count: int) -> None:
    """A sampling client each: without one, the SDK begins no session."""
    services = [tinker.ServiceClient(base_url=url) for _ in range(count)]
    model = services[0].get_server_capabilities().supported_models[0].model_name
    samplers = [service.create_sampling_client(base_model=model) for service in services]
    say(ready=True)
    sys.stdin.read()
    say(open=len(samplers))
    os._exit(0)  # ends of sessions are not what is measured


if __name__ == "__main__":
    what, address, *numbers = sys.argv[1:]
    {"samples": samples, "sessions": sessions}[what](address, *map(int, numbers))
