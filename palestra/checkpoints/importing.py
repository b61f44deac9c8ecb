"""Adapters from elsewhere as checkpoints of a server: uploaded, loaded by its engine, and saved under a name."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from msgspec import Struct, to_builtins
from safetensors.torch import load_file, save_file

from palestra.checkpoints import CheckpointError
from palestra.checkpoints.remote import NO_KEY, ServerCheckpoints, server_errors
from palestra.model.errors import ModelError
from palestra.model.lora.adapter_files import CONFIG, WEIGHTS, read_config
from palestra.types import LoraConfig
from palestra.util.hugging_face import find_in_cache, is_hub_id
from palestra.util.suggest import did_you_mean

PART_BYTES = 8 << 20  # a server takes 16 MiB in one request
UPLOAD_S = 120.0
ALPHA = LoraConfig().alpha
"""The scale of adapters that Tinker clients make; they load no others."""


class ImportedCheckpoint(Struct, frozen=True, kw_only=True):
    """The addresses of an imported adapter."""

    base_model: str
    rank: int
    weights: str
    """Address to train from."""
    sampler_weights: str
    """Address to sample from."""


def import_adapter(
    source: str, server: str, key: str | None = None, *, model: str | None = None, name: str | None = None
) -> ImportedCheckpoint:
    """Brings a PEFT folder, or an adapter of the hub that is in the local cache, into a server. `model` is its base
    model's name there, if the adapter names it otherwise; `name` that of the checkpoint. Raises CheckpointError."""
    folder = adapter_folder(source)
    try:
        lora = read_config(folder)
    except ModelError as error:
        raise CheckpointError(str(error)) from None
    if lora.per_expert:
        raise CheckpointError(f"{source} has matrices of its own for each expert, which Tinker's clients cannot load")
    remote = ServerCheckpoints(server, key)
    base_model = served_base(_named_base(folder), remote.base_models(), model, source=source, server=server)
    with _scaled(folder, lora) as ready:
        staged = _upload(ready, server, key, base_model, LoraConfig(**{**to_builtins(lora), "alpha": ALPHA}))
    try:
        weights, sampler = remote.save_again(staged, name or _checkpoint_name(source))
    except CheckpointError as error:
        raise CheckpointError(f"{source} does not fit {base_model}: {error}") from None
    finally:
        remote.delete(staged)
    return ImportedCheckpoint(base_model=base_model, rank=lora.rank, weights=weights, sampler_weights=sampler)


def adapter_folder(source: str) -> Path:
    """The folder of an adapter, given by its path or by a Hugging Face id. Raises CheckpointError."""
    if is_hub_id(source):
        try:
            return find_in_cache(source, CONFIG)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
    folder = Path(source)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {source}")
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        hint = "; it is a whole model, which is served with --model" if (folder / "config.json").is_file() else ""
        raise CheckpointError(f"{source} is not an adapter of PEFT: it needs {CONFIG} and {WEIGHTS}{hint}")
    return folder


def served_base(named: str, served: Sequence[str], given: str | None, *, source: str, server: str) -> str:
    """Finds the served model of an adapter: `given`, or the one that it names as its base."""
    if given is not None:
        if given not in served:
            raise CheckpointError(f"{server} does not serve {given}; {did_you_mean(given, served)}")
        return given
    if named in served:
        return named
    same = [name for name in served if _leaf(name) == _leaf(named)] if named else []
    if len(same) == 1:
        return same[0]
    raise CheckpointError(
        f"{source} was trained on {named or 'a model that it does not name'}, and {server} serves "
        f"{', '.join(served)}; if one of these is the same model, name it with --model"
    )


def _leaf(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def _named_base(folder: Path) -> str:
    return str(json.loads((folder / CONFIG).read_text()).get("base_model_name_or_path") or "")


def _checkpoint_name(source: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", _leaf(str(source))).strip(".-")[:100] or "imported"


@contextmanager
def _scaled(folder: Path, lora: LoraConfig) -> Iterator[Path]:
    """The adapter with the scale that Tinker's adapters have: the same function, written in another way."""
    raw = json.loads((folder / CONFIG).read_text())
    if lora.alpha == ALPHA and not raw.get("use_rslora"):
        yield folder
        return
    factor = lora.alpha / ALPHA
    with TemporaryDirectory(prefix="palestra-import-") as temporary:
        scaled = Path(temporary)
        patterns = {name: value * ALPHA / raw["lora_alpha"] for name, value in (raw.get("alpha_pattern") or {}).items()}
        raw |= {"lora_alpha": ALPHA, "use_rslora": False, "alpha_pattern": patterns}
        (scaled / CONFIG).write_text(json.dumps(raw))
        tensors = load_file(folder / WEIGHTS)
        changed = {name: t.float() * factor if ".lora_B." in name else t for name, t in tensors.items()}
        save_file(changed, scaled / WEIGHTS, metadata={"format": "pt"})
        yield scaled


def _upload(folder: Path, server: str, key: str | None, base_model: str, lora: LoraConfig) -> str:
    """Returns the address of what was uploaded, which expires."""
    upload_id, headers = secrets.token_hex(16), {"X-API-Key": key or NO_KEY}
    with server_errors(server), httpx.Client(base_url=server, headers=headers, timeout=UPLOAD_S) as client:
        for name in (CONFIG, WEIGHTS):
            with (folder / name).open("rb") as file:
                while body := file.read(PART_BYTES):
                    offset = file.tell() - len(body)
                    place = f"/api/v1/uploads/{upload_id}/{name}"
                    _answered(client.put(place, params={"offset": offset}, content=body), server)
        shape = {name: value for name, value in to_builtins(lora).items() if name != "seed"}
        body = {"upload_id": upload_id, "base_model": base_model, "lora": shape}
        return _answered(client.post("/api/v1/import_weights", json=body), server)["tinker_path"]


def _answered(answer: httpx.Response, server: str) -> dict[str, str]:
    if answer.status_code == 404:
        raise CheckpointError(f"{server} takes no weights from elsewhere; servers of Palestra do")
    if answer.is_error:
        raise CheckpointError(f"{server}: {_reason(answer)}")
    return answer.json()


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"
