"""Every kernel compiles for Hopper in the shapes of published models, and fits into its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

HOPPER_BYTES = 227 << 10  # of shared memory for one program


@pytest.mark.slow
@pytest.mark.timeout(1200)  # three minutes on a quiet core, unless Triton's cache has them
def test_every_kernel_compiles_for_hopper():
    """In a process without the interpreter, and without a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.model.kernels.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found
    too_large = [facts for facts in found if facts["shared_bytes"] > HOPPER_BYTES]
    assert not too_large
