"""The `palestra` command. Importing it loads click and nothing heavy. Begin at `app`."""

from palestra.cli.app import main

__all__ = ["main"]
