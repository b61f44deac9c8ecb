"""A model folder, opened: spec, decoder, tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer

from palestra.model import kernels
from palestra.model.decoder import Decoder
from palestra.model.errors import ModelError, TokenizerError
from palestra.model.loading.row_share import RowShare
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weights import DTYPES, read_weights
from palestra.model.numerics import Numerics, set_numerics
from palestra.model.quantised.forms import FORMS
from palestra.model.vision.feature_store import FeatureStore
from palestra.model.vision.tower import open_tower

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from palestra.model.tensor_group import TensorGroup


@dataclass(eq=False)
class Model:
    """A base model as `load_model` returns it: its folder, its shape, its weights, and its tokenizer when asked for."""

    folder: Path
    spec: ModelSpec
    decoder: Decoder = field(repr=False)
    weights: str | None = None
    """The form of 8 or 4 bits in which the weights of its linear layers are kept; None where that is the dtype."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)


def load_model(
    folder: str | Path,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    numerics: Numerics = "exact",
    weights: str | None = None,
    mesh: DeviceMesh | None = None,
    tensor: TensorGroup | None = None,
    sees: bool = True,
) -> Model:
    """Reads a Hugging Face model folder. Raises ModelError where it is missing or cannot be computed here.

    Without `dtype`, the weights keep their stored type where the device supports it, and become float32 otherwise. The
    device `auto` is a GPU if there is one. `numerics` matters on GPUs only: see `set_numerics`. `weights` names a form
    of 8 or 4 bits in which the weights of linear layers are kept (see `quantised.forms`); "bf16" is that dtype. With a
    mesh of processes, each reads and holds its share of the layers (see `sharding`). With `tensor`, each reads, holds
    and computes its part of every layer (see `tensor_group`). The vision tower of a model that sees is read where one
    process computes alone, unless `sees` is false; elsewhere the model reads text only.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; make a small one with: palestra model random {folder}")
    spec = ModelSpec.from_folder(folder)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as e:
        raise ModelError(f"device {device!r} cannot be used here ({e}); `palestra doctor` lists what works") from None
    if weights == "bf16":
        if dtype not in (None, "bfloat16"):
            raise ModelError(f"weights 'bf16' contradict dtype {dtype!r}; leave one of them out")
        dtype, weights = "bfloat16", None
    # A CPU computes float16 many times slower than float32.
    supported = [n for n in DTYPES if n != "float16" or kernels.can_run_on(where)]
    name = dtype or (spec.dtype if spec.dtype in supported else "float32")
    if name not in supported:
        raise ModelError(f"dtype {name!r} is not supported on {where.type}; supported: {', '.join(supported)}")
    form = FORMS.get(weights) if weights else None
    if weights and form is None:
        raise ModelError(f"weights {weights!r} are not known; there are: bf16, {', '.join(FORMS)}")
    if where.type == "cuda":
        set_numerics(numerics)
    if tensor is not None:
        if form is not None:
            raise ModelError(f"weights in {weights} cannot be divided among processes yet; leave weights or tensor out")
        own = tensor.shard.spec(spec)
        own, spec = replace(own, tower=None), replace(spec, tower=None)
        return Model(
            folder, spec, Decoder(own, read_weights(folder, spec, DTYPES[name], where, tensor=tensor.shard), tensor)
        )
    if mesh is None:
        return _on_one_device(folder, spec if sees else replace(spec, tower=None), DTYPES[name], where, weights)
    from palestra.model.sharding import shard_layers

    if form is not None:
        raise ModelError(f"weights in {weights} cannot be divided among processes yet; leave weights or shard out")
    spec = replace(spec, tower=None)  # pictures are read by one process alone so far
    share = RowShare(mesh.get_local_rank(), mesh.size())
    decoder = Decoder(spec, read_weights(folder, spec, DTYPES[name], where, None, share))
    shard_layers(decoder, share, mesh)
    return Model(folder, spec, decoder)


def _on_one_device(
    folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, weights: str | None
) -> Model:
    """Loads the model on one device, with the vision tower if the files have one."""
    tower = None if spec.tower is None else open_tower(folder, spec.tower, dtype, device)
    if tower is None:
        spec = replace(spec, tower=None)
    form = FORMS.get(weights) if weights else None
    decoder = Decoder(spec, read_weights(folder, spec, dtype, device, form))
    if tower is not None:
        decoder.vision = FeatureStore(tower)
    return Model(folder, spec, decoder, weights)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Reads a folder's `tokenizer.json`. Raises TokenizerError where that file is missing or malformed."""
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"{file}: no such file; only fast tokenizers (tokenizer.json) are supported: save one with "
            "AutoTokenizer.from_pretrained(…).save_pretrained(folder)"
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as e:  # the library raises a bare Exception for a malformed file
        raise TokenizerError(f"{file}: not a valid tokenizer file ({e}); copy it again") from None
