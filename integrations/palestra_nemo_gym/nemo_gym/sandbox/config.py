"""Resolves a server's `sandbox_provider`: a block of the config by its name, or given in place."""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf

from nemo_gym.json_types import JsonMapping, JsonObject

METADATA = "default_metadata"


def resolve_provider_config(
    sandbox_provider: str | JsonMapping, named_configs: JsonMapping | None = None
) -> JsonObject:
    """`{name: settings}`. Raises ValueError where it is not one provider."""
    block = {name: value for name, value in _block(sandbox_provider, named_configs).items() if name != METADATA}
    if len(block) != 1:
        raise ValueError(f"sandbox_provider={sandbox_provider!r}: should have exactly one provider, has {list(block)}")
    return block


def resolve_provider_metadata(
    sandbox_provider: str | JsonMapping, named_configs: JsonMapping | None = None
) -> JsonObject:
    found = _block(sandbox_provider, named_configs).get(METADATA) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"sandbox_provider={sandbox_provider!r}: {METADATA} should be a mapping, is {found!r}")
    return dict(found)


def _block(provider: str | JsonMapping, named_configs: JsonMapping | None) -> JsonObject:
    if isinstance(provider, str):
        found = (named_configs or {}).get(provider)
        if found is None:
            raise ValueError(f"sandbox_provider={provider!r} is not defined: the config has no block of that name")
    elif isinstance(provider, Mapping):
        found = provider
    else:
        raise TypeError(f"sandbox_provider should be a name or a mapping, is {provider!r}")
    plain = OmegaConf.to_container(found, resolve=True) if isinstance(found, DictConfig) else found
    if not isinstance(plain, Mapping):
        raise ValueError(f"sandbox_provider={provider!r}: should be a mapping, is {plain!r}")
    return {str(name): value for name, value in plain.items()}
