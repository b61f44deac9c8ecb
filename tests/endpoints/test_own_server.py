"""A run's own server gets settings with which its model fits, or the run ends with a sentence."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from palestra.cli import main
from palestra.endpoints.own_server import own_server
from palestra.rollouts.policy_sampler import PolicyError


async def _notes_of(model: Path, folder: Path, memory: str) -> list[str]:
    """What a run says while such a server starts."""
    notes: list[str] = []
    server = own_server(str(model), "small", folder, folder / "server.log", notes.append, device="cpu", memory=memory)
    async with server as url:
        assert url.startswith("http://127.0.0.1:")
    return notes


def test_a_model_that_does_not_fit_gets_what_makes_it_fit(micro_model: Path, tmp_path: Path) -> None:
    notes = asyncio.run(_notes_of(micro_model, tmp_path, "400MB"))
    assert "small fits the 400 MB of cpu with cache_tokens=32768" in notes


def test_a_model_that_never_fits_is_refused_before_it_starts(micro_model: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="small needs more than the 1 MB of cpu; choose a smaller model"):
        asyncio.run(_notes_of(micro_model, tmp_path, "1MB"))
    assert not (tmp_path / "server.log").exists()


def test_a_plan_is_printed_as_json(micro_model: Path) -> None:
    command = ["serve", "--model", str(micro_model), "--name", "small"]
    asked = [*command, "--device", "cpu", "--dry-run", "--json"]
    done = CliRunner().invoke(main, [*asked, "--memory", "400MB"])
    plan = json.loads(done.stdout)
    assert (done.exit_code, plan["too_full"], plan["memory"]) == (1, ["cpu"], {"cpu": 400_000_000})
    assert plan["advice"] == {"small": ["models.0.cache_tokens=32768"]}
    done = CliRunner().invoke(main, asked)
    assert (done.exit_code, json.loads(done.stdout)["too_full"]) == (0, [])
    done = CliRunner().invoke(main, [*command, "--json"])
    assert (done.exit_code, "--json belongs to --dry-run" in done.stderr) == (2, True)
