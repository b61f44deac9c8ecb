"""`python -m palestra.engine`: one worker, configured by the variable PALESTRA_WORKER (see `types.engine`)."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import time
from pathlib import Path

import msgspec

from palestra.engine.log import set_up_logging
from palestra.types.engine import WorkerConfig

log = logging.getLogger("palestra.engine")

CANNOT_START = 2
BROKEN = 1
LOCK_WAIT_S = 5.0  # an earlier worker may be on its way out


def main() -> int:
    set_up_logging()
    try:
        config = msgspec.json.decode(os.environ.get("PALESTRA_WORKER", ""), type=WorkerConfig)
    except msgspec.MsgspecError as e:
        log.error("cannot_start reason=%s", f"PALESTRA_WORKER is not a worker's configuration: {e}")
        return CANNOT_START
    # Not at the top: a wrong configuration is told without waiting for torch.
    from palestra.engine.backend import BackendBroken
    from palestra.engine.torch_backend import TorchBackend, TorchConfig
    from palestra.engine.worker import Worker

    try:
        lock = lock_folder(Path(config.state))
        backend = TorchBackend(TorchConfig.of(config))
    except Exception as e:
        log.error("cannot_start model=%s reason=%s", config.model, e)
        return CANNOT_START
    try:
        Worker(config, backend).run()
    except BackendBroken as e:
        log.error("backend_broken reason=%s", e)
        os._exit(BROKEN)  # nothing of it is worth saving: the snapshots are
    except Exception:
        log.exception("crashed")
        os._exit(BROKEN)
    os.close(lock)
    return 0


def lock_folder(state: Path) -> int:
    """One worker a state folder; the lock goes with the process."""
    state.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(state / "worker.lock", os.O_CREAT | os.O_RDWR, 0o600)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RuntimeError(f"another worker uses {state}") from None
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
