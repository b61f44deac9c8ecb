"""Reports the end of a run to an address, in seconds or not at all."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx

from palestra.config.train import RunConfig
from palestra.config.webhook import WebhookConfig
from palestra.runs.writer import EventKind, RunFolder
from palestra.util.json_types import JsonObject

PAUSES_S = (0.3, 0.6)
"""Before the second and the third attempt; there is no fourth."""
TIMEOUT_S = 2.0
DEADLINE_S = 10.0  # whatever the server does, the run has ended by then
FIGURES = ("reward/mean", "eval/success", "eval/reward_mean", "eval/loss", "loss/mean")


def report_end(config: RunConfig, run: RunFolder, summary: JsonObject) -> None:
    """Sends how the run ended, if its config wants it. Never raises, and returns within seconds."""
    webhook, status = config.webhook, summary["status"]
    if webhook is None or status not in webhook.on:
        return
    if (address := webhook.address) is None:
        trouble = [_without_address(webhook)]
    else:
        trouble = _sent_aside(address, message(config, run, summary))
    for text in trouble:
        run.event(EventKind.WARNING, message=f"webhook: {text}")


def _sent_aside(address: str, body: JsonObject) -> list[str]:
    """Sends in a thread that is waited for until the deadline at most; returns what went wrong."""
    trouble = [f"{_host(address)} took too long"]

    def work() -> None:
        with _unlogged(address):
            trouble[:] = _send(address, body)

    thread = threading.Thread(target=work, name="webhook", daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return list(trouble)


def _send(address: str, body: JsonObject) -> list[str]:
    reason = ""
    for pause_s in (*PAUSES_S, None):
        try:
            answer = httpx.post(address, json=body, timeout=TIMEOUT_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = type(error).__name__  # its text may have the address
        else:
            if answer.is_success:
                return []
            reason = f"HTTP {answer.status_code}"
            if answer.status_code < 500 and answer.status_code != 429:
                break
        if pause_s is not None:
            time.sleep(pause_s)
    return [f"{_host(address)} did not take the report ({reason})"]


def message(config: RunConfig, run: RunFolder, summary: JsonObject) -> JsonObject:
    """The body of the report; docs/training.md explains its fields."""
    status, last, step = summary["status"], summary["last"], summary["last_step"]
    text = f"run {run.name} is {status} after step {step or 0} of {config.steps}"
    if error := summary.get("error"):
        text += f": {error}"
    return {
        "event": "run_ended",
        "run": run.name,
        "kind": getattr(config, "kind", None),
        "model": config.model.name,
        "status": status,
        "step": step,
        "steps": config.steps,
        "seconds": summary["seconds"],
        "attempts": summary["attempts"],
        "metrics": {name: last[name] for name in FIGURES if name in last},
        "best": summary["best"],
        "selected": summary.get("selected"),
        "error": error,
        "host": socket.gethostname(),
        "text": text,
    }


@contextmanager
def _unlogged(address: str) -> Iterator[None]:
    """Keeps the address out of the log of the HTTP client, which would have every request in it."""

    def is_harmless(record: logging.LogRecord) -> bool:
        return address not in record.getMessage()

    logger = logging.getLogger("httpx")
    logger.addFilter(is_harmless)
    try:
        yield
    finally:
        logger.removeFilter(is_harmless)


def _host(address: str) -> str:
    return urlsplit(address).hostname or "the address"


def _without_address(webhook: WebhookConfig) -> str:
    if webhook.url.startswith("$"):
        return f"the environment has no {webhook.url[1:]}; nothing was reported"
    return "the address is not saved with a run; give it again at a resume: webhook.url=…"
