"""The beginning of a worker on another machine than the server: its folders there, its state, its base model.

Owns: what is where on this machine. Never touches: what the files mean.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from pathlib import Path

import msgspec

from palestra.engine.server_files import ServerFiles
from palestra.engine.worker import CopiedState
from palestra.types.engine import FileArea, WorkerConfig
from palestra.util.atomic_files import TEMPORARY, sync
from palestra.util.hugging_face import find_in_cache
from palestra.util.locks import FileLock, Locked
from palestra.util.model_fingerprint import model_fingerprint

log = logging.getLogger(__name__)

FETCHED = "fetched"
"""A file that says that the state was fetched: from then on this machine has newer snapshots than the server."""
OWN = ("models", "samplers")
LOOK_S = 0.5


def local_state(config: WorkerConfig) -> WorkerConfig:
    """Returns the config with the state folder of this life, and deletes earlier ones: the server has had another
    worker since."""
    state = Path(config.node_folder).expanduser() / config.state
    state.mkdir(parents=True, exist_ok=True)
    for other in state.parent.iterdir():
        if other != state:
            shutil.rmtree(other, ignore_errors=True)
    return msgspec.structs.replace(config, state=str(state))


def with_base_model(config: WorkerConfig) -> WorkerConfig:
    """Fetches the base model for a follower, which has no state."""
    files = ServerFiles(config)
    try:
        return msgspec.structs.replace(config, model=str(base_model(config, files)))
    finally:
        files.close()


def begin_at_node(config: WorkerConfig) -> tuple[WorkerConfig, CopiedState]:
    """Fetches what this machine does not have; the configuration that is returned names its folders."""
    files = ServerFiles(config)
    try:
        state = Path(config.state)
        is_new = fetch_state(state, files)
        samplers = {Path(entry.path).name for entry in files.entries(FileArea.STATE, "samplers")}
        model = base_model(config, files)
    finally:
        files.close()
    return msgspec.structs.replace(config, model=str(model)), CopiedState(is_new, samplers)


def fetch_state(state: Path, files: ServerFiles) -> bool:
    """Fetches snapshots and samplers from the server, unless a process of this life has gone on from them here."""
    if (state / FETCHED).exists():
        return False
    for name in OWN:
        shutil.rmtree(state / name, ignore_errors=True)
    files.fetch(FileArea.STATE, "", state)
    (state / FETCHED).touch()
    sync(state)
    return True


def base_model(config: WorkerConfig, files: ServerFiles) -> Path:
    """The base model on this machine: the server's path, the cache of Hugging Face, or fetched from the server once."""
    fetched = Path(config.node_folder).expanduser() / "models" / config.fingerprint
    candidates = [Path(config.model), fetched]
    if config.hub_id is not None:
        with contextlib.suppress(ValueError):
            candidates.insert(1, find_in_cache(config.hub_id))
    for folder in candidates:
        if (folder / "config.json").is_file() and (folder == fetched or _is_same(folder, config)):
            return folder
    with _waited_lock(fetched.with_name(f"{config.fingerprint}.lock")):
        if not fetched.exists():
            log.info("fetching_base_model folder=%s", fetched)
            unfinished = fetched.with_name(fetched.name + TEMPORARY)
            files.fetch(FileArea.MODEL, "", unfinished)
            unfinished.rename(fetched)
            sync(fetched.parent)
    return fetched


def _is_same(folder: Path, config: WorkerConfig) -> bool:
    try:
        return model_fingerprint(folder) == config.fingerprint
    except OSError:
        return False


def _waited_lock(file: Path) -> FileLock:
    """Several workers of a machine need the same model: one fetches it."""
    while True:
        try:
            return FileLock(file)
        except Locked:
            time.sleep(LOOK_S)
