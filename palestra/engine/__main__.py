"""`python -m palestra.engine`: one worker, configured by the variable PALESTRA_WORKER (see `types.engine`)."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from palestra import __version__
from palestra.engine.exit_codes import BROKEN, CANNOT_START
from palestra.engine.log import set_up_logging
from palestra.types.engine import PRELOAD, PRELOAD_GO, WorkerConfig
from palestra.util.locks import FileLock, Locked

if TYPE_CHECKING:
    from palestra.engine.backend import ComputeBackend

log = logging.getLogger("palestra.engine")

OUT_OF_MEMORY = ("can't allocate memory", "Cannot allocate memory", "out of memory")  # torch's words for it
PRELOAD_LOOK_S = 0.1
LOCK_WAIT_S = 5.0  # an earlier worker may be on its way out


def main() -> int:
    set_up_logging()
    try:
        config = msgspec.json.decode(os.environ.get("PALESTRA_WORKER", ""), type=WorkerConfig)
    except msgspec.MsgspecError as e:
        return cannot_start(f"PALESTRA_WORKER is not a worker's configuration: {e}")
    if config.address.startswith("tcp:") and config.server_key is None:
        return cannot_start(f"the link to {config.address} would not be encrypted: server_key is missing")
    if config.is_remote and config.version != __version__:
        return cannot_start(f"this node has Palestra {__version__}, the server {config.version}; install the same")
    if place := os.environ.get("PALESTRA_FOLLOWER"):
        return follow(config, place)
    try:
        gc.disable()  # imports hold no garbage, and a search for it takes a tenth of the start
        # Not at the top: a wrong configuration is reported without waiting for torch.
        from palestra.engine.backend import BackendBroken
        from palestra.engine.snapshots import StateRefused
        from palestra.engine.worker import EngineWorker

        copied, standby = None, os.environ.get(PRELOAD)
        if standby is not None:
            backend = make_backend(config)
            log.info("preloaded")
            life = wait_until_needed(Path(config.state), *standby.split())
            if life is None:
                return 0
            config = msgspec.structs.replace(config, life=life)
            lock = lock_folder(Path(config.state))
        elif config.is_remote:
            from palestra.engine.node import begin_at_node, local_state

            config = local_state(config)
            lock = lock_folder(Path(config.state))
            config, copied = begin_at_node(config)
            backend = make_backend(config)
        else:
            lock = lock_folder(Path(config.state))
            backend = make_backend(config)
    except Exception as e:
        return cannot_start(reason_of(e, config.device))
    try:
        EngineWorker(config, backend, copied).run()
        backend.close()
    except StateRefused as e:
        return cannot_start(str(e))
    except BackendBroken as e:
        log.error("backend_broken reason=%s", e)
        os._exit(BROKEN)  # nothing of it is worth saving: the snapshots are
    except Exception:
        log.exception("crashed")
        os._exit(BROKEN)
    lock.release()
    return 0


def wait_until_needed(state: Path, standby: str, token: str) -> str | None:
    """Waits until the standby goes on with this process. Returns the `life` that it gives it; None: it has ended."""
    go = state / PRELOAD_GO
    while True:
        meant, _, life = go.read_text().partition(" ") if go.exists() else ("", "", "")
        if meant == token:
            return life
        try:
            os.kill(int(standby), 0)
        except ProcessLookupError:
            return None
        time.sleep(PRELOAD_LOOK_S)


def make_backend(config: WorkerConfig) -> ComputeBackend:
    from palestra.engine.torch_backend import TorchBackend
    from palestra.engine.torch_trainer import TorchConfig

    if not config.devices:
        collect_garbage_again()
        return TorchBackend(TorchConfig.of(config))
    from palestra.engine.ranks.group_backend import GroupBackend

    collect_garbage_again()
    return GroupBackend(config)


def collect_garbage_again() -> None:
    """Turns collection on after the imports, which hold no garbage and are not searched later."""
    gc.freeze()
    gc.enable()


def follow(config: WorkerConfig, place: str) -> int:
    """A rank of a group that is not the first."""
    from palestra.engine.ranks.follower import Follower, FollowerConfig, end_with_rank_0

    end_with_rank_0()
    if config.meeting is not None:
        own = FollowerConfig.elsewhere(config, int(place))
    else:
        own = msgspec.json.decode(place, type=FollowerConfig)
    set_up_logging(own.rank)
    try:
        if config.is_remote:
            from palestra.engine.node import with_base_model

            config = with_base_model(config)
        follower = Follower(config, own)
    except Exception as e:
        return cannot_start(f"rank {own.rank}: {reason_of(e, config.devices[own.rank])}")
    try:
        follower.run()
    except Exception:
        log.exception("crashed")
        os._exit(BROKEN)
    return 0


def cannot_start(reason: str) -> int:
    """The server shows the user what stands behind `error:`."""
    sys.stderr.write(f"error: {reason}\n")
    return CANNOT_START


def reason_of(error: Exception, device: str) -> str:
    """Returns the reason in words for the user, who has typed the name of a model and does not know of workers."""
    if isinstance(error, ModuleNotFoundError):
        return f"the engine needs {error.name}; to install it: pip install 'palestra[engine]'"
    message = str(error)
    if isinstance(error, MemoryError) or any(sign in message for sign in OUT_OF_MEMORY):
        details = f" ({message.splitlines()[0]})" if message else ""
        hint = "use a smaller model, or a lower models.0.cache_tokens"
        where = "its device" if device == "auto" else f"device {device!r}"
        return f"there is not enough memory for the model on {where}{details}; {hint}"
    return message or type(error).__name__


def lock_folder(state: Path) -> FileLock:
    """One worker a state folder; the lock goes with the process."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return FileLock(state / "worker.lock")
        except Locked:
            if time.monotonic() > deadline:
                raise RuntimeError(f"another worker uses {state}") from None
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
