"""One config system for every command: pydantic models, files merged left to right, dotted overrides on top.

Begin at `serve` and `train`; `load` merges.
"""

from palestra.config.base import Config, Folder
from palestra.config.errors import ConfigError
from palestra.config.load import Override, dump_config, load_config

__all__ = ["Config", "ConfigError", "Folder", "Override", "dump_config", "load_config"]
