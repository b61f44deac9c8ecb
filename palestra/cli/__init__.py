"""The `palestra` command. Importing it loads click and nothing heavy."""

from palestra.cli.app import main

__all__ = ["main"]
