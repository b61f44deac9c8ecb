"""Becomes a vLLM server that ends when the process which started it does. Run by vLLM's Python: nothing of ours here.

python launcher.py PARENT_PID [vLLM's arguments]
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(sys.argv[1]):  # it was quicker
            sys.exit("the server that wanted vLLM is gone")
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *sys.argv[2:]]
    os.execv(sys.executable, server)
