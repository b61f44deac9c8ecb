"""Palestra: reinforcement learning for LLM agents on machines you own."""

import os

__version__ = "0.1.0"

# torch's OpenMP threads spin while they wait for work. When another process wants the cores (a server beside its
# worker, two test runs), the spinning starves it and each product takes up to 50 times as long. A short spin costs
# nothing on a quiet machine. The library reads this once, when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
