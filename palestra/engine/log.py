"""Logs to stderr: one line each, key=value; a traceback is folded into its line."""

from __future__ import annotations

import logging
import sys
import time


class OneLine(logging.Formatter):
    converter = time.gmtime

    def __init__(self, process: str) -> None:
        line = f"%(asctime)s level=%(levelname)s {process}logger=%(name)s event=%(message)s"
        super().__init__(line, "%Y-%m-%dT%H:%M:%SZ")

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", " | ")


def set_up_logging(rank: int | None = None) -> None:
    """`rank`: of a process that writes into the log of another."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("" if rank is None else f"rank={rank} "))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
