"""Palestra: reinforcement learning for LLM agents on machines you own."""

import os

__version__ = "0.2.0"

# torch's OpenMP threads spin while they wait for work. When another process wants the cores (a server beside its
# worker, two test runs), the spinning starves it: a matrix product was seen to take 50 times as long. A shorter spin
# than the library's 300,000 rounds is as fast on a quiet machine and keeps a busy one at its fair share. The library
# reads this once, when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
