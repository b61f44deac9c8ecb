"""What every test may use: random models made once per test process, no network, fair use of the cores."""

from __future__ import annotations

import atexit
import gc
import os
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported anywhere: parallel test processes with all cores each only get in each other's way.
    os.environ["OMP_NUM_THREADS"] = "1"
    # One authority in place of the system's: to read those takes 25 ms for each client that a test or a command makes.
    os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "fixtures" / "authority.pem")
    atexit.register(os._exit, 0)  # after all others: to free every object takes two seconds, and nobody needs it
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the GPU's kernels are tested on the CPU

import json
import logging
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.properties import EVERYDAY
from tests.warm_start import wait_for_no_disk

if TYPE_CHECKING:
    from tests.server.model_api.conftest import Ephebe

RandomModel = Callable[..., Path]

SHARING = {
    "tests/server/model_api": "ephebe",
    **dict.fromkeys(
        ("tests/training", "tests/rollouts/episodes", "tests/evaluation", "tests/endpoints", "tests/examples"),
        "training",
    ),
    "tests/gym/models": "ephebe",
    "tests/gym/supervisor": "gym",
    "tests/gym/stock": "stock gym",
    "tests/server/agentjet": "keyed",
    "tests/server/episodes": "keyed",
    "tests/server/pages": "keyed",
    "tests/episodes/client": "keyed",
    "tests/cli/test_episodes.py": "keyed",
    "tests/server": "server",
    "tests/store": "databases",
    "tests/agents/test_agent_": "coding",
}
"""What the tests below these paths share, which is started once: they run in one test process."""

wait_for_no_disk()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts in the background ignore it
gc.disable()  # what is imported and collected stays: nothing is found in it


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Without what the clients of other tests say: those of the SDK go on after their test."""

    def is_own(record: logging.LogRecord) -> bool:
        return not record.name.startswith("tinker.")

    caplog.handler.addFilter(is_own)
    yield caplog
    caplog.handler.removeFilter(is_own)


def pytest_collection_finish() -> None:
    for name in logging.root.manager.loggerDict:
        if name.partition(".")[0] == "torch":
            logging.getLogger(name).propagate = True  # else pytest attaches itself to each of forty, six times a test
    gc.freeze()
    gc.set_threshold(10_000)  # as the server; Python's default of 700 is reached in every test
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how many tests were skipped for which missing program: they look like passed ones otherwise."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(one.longrepr[2].removeprefix("Skipped: ") for one in reports if isinstance(one.longrepr, tuple))
    if reasons:
        terminalreporter.section("skipped here, and why (palestra doctor lists what is missing)")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:>5}  {reason}")


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        gc.unfreeze()


class SharingSchedule(LoadScopeScheduling):
    """Modules are given to test processes whole, and those that share a server together."""

    def _split_scope(self, nodeid: str) -> str:
        return next((name for path, name in SHARING.items() if nodeid.startswith(path)), nodeid.partition("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharingSchedule:
    return SharingSchedule(config, log)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """`random_model(family=..., **options)` as `make_random_model`, made at the first call. Do not write into it."""
    from palestra.testing.random_model import make_random_model

    made: dict[str, Path] = {}

    def get(family: str = "qwen3", **options: Any) -> Path:
        key = json.dumps({"family": family, **options}, sort_keys=True)
        if key not in made:
            made[key] = make_random_model(tmp_path_factory.mktemp(family), family=family, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def micro_model(random_model: RandomModel) -> Path:
    return random_model()


@pytest.fixture(scope="session")
def shared_ephebe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Ephebe]]:
    """`shared_ephebe("key=value", setting=value)`: the bundled model's server with these settings, started at the first
    call and there for all tests of this process, which have keys, runs and sessions of their own in it."""
    from tests.server.model_api.conftest import ephebe_in

    started: dict[str, Ephebe] = {}
    with ExitStack() as stack:

        def get(*overrides: str, **settings: Any) -> Ephebe:
            key = json.dumps([overrides, settings], sort_keys=True)
            if key not in started:
                made = ephebe_in(tmp_path_factory.mktemp("ephebe"), *overrides, **settings)
                started[key] = stack.enter_context(made)
                made.start()
            return started[key]

        yield get


settings.load_profile(EVERYDAY)
