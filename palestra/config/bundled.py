"""Small models and configs that ship with the package."""

from __future__ import annotations

from pathlib import Path

from palestra.util.hugging_face import find_in_cache, is_hub_id
from palestra.util.suggest import did_you_mean

BUNDLED = Path(__file__).parent.parent / "bundled"
EPHEBE, EPHEBE_SHELL = "ephebe", "ephebe-shell"
"""Names of the models."""


def bundled_model(name: str) -> Path | None:
    """Folder of the bundled model of this name; None if there is none, or if a folder of this name exists here."""
    return BUNDLED / name if name in (EPHEBE, EPHEBE_SHELL) and not Path(name).is_dir() else None


def find_model(name: str) -> Path:
    """Folder of a model: a bundled one, a Hugging Face id in the local cache, or a path. Raises ValueError."""
    return bundled_model(name) or (find_in_cache(name) if is_hub_id(name) else Path(name).expanduser())


def bundled_configs() -> list[str]:
    return sorted(one.stem for one in (BUNDLED / "configs").glob("*.yaml"))


def find_config_file(given: str) -> Path:
    """The file of a config, given as a path or as the name of a bundled config. Raises FileNotFoundError."""
    file, preset = Path(given), BUNDLED / "configs" / f"{given}.yaml"
    if file.is_file() or not preset.is_file():
        if not file.exists() and file.suffix not in {".yaml", ".yml", ".json"}:
            hint = did_you_mean(given, bundled_configs(), otherwise="bundled configs")
            raise FileNotFoundError(f"no config file {given!r}; {hint}")
        return file
    return preset
