"""A server of NeMo Gym's as a process: what it loads, what it says of a bad config, when it ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import yaml
from aiohttp import web

from palestra.gym.collect.collection import CollectionStatus
from palestra.gym.nemo_gym_compat import COMPAT, provided_packages
from tests.gym.stock.conftest import FOLDERS, StockGym, row_of
from tests.gym.stock.upstream import complete
from tests.gym.test_venvs import wheel
from tests.net.attacks import check_bounds

PUBLIC = [
    "AggregateMetrics",
    "AggregateMetricsRequest",
    "BaseMultiRewardVerifyResponse",
    "BaseResourcesServerConfig",
    "BaseResponsesAPIAgentConfig",
    "BaseResponsesAPIModelConfig",
    "BaseRunRequest",
    "BaseRunServerInstanceConfig",
    "BaseSeedSessionRequest",
    "BaseSeedSessionResponse",
    "BaseServerConfig",
    "BaseVerifyRequest",
    "BaseVerifyResponse",
    "Domain",
    "ModelServerRef",
    "NeMoGymAsyncOpenAI",
    "NeMoGymChatCompletion",
    "NeMoGymChatCompletionCreateParamsNonStreaming",
    "NeMoGymResponse",
    "NeMoGymResponseCreateParamsNonStreaming",
    "ReverifyMode",
    "SESSION_ID_KEY",
    "ServerClient",
    "SimpleResourcesServer",
    "SimpleResponsesAPIAgent",
    "SimpleResponsesAPIModel",
    "get_response_json",
    "raise_for_status",
]
HEAVY = [
    "anthropic",
    "datasets",
    "hydra",
    "mcp",
    "mlflow",
    "numpy",
    "openai",
    "palestra",
    "pandas",
    "ray",
    "requests",
    "torch",
    "wandb",
]


WORDY = """
import sys

import gym_word
from fastapi import FastAPI

from nemo_gym import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer


class Wordy(SimpleResourcesServer):
    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.get("/word")(lambda: [gym_word.WORD, sys.prefix])
        return app

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)


if __name__ == "__main__":
    Wordy.run_webserver()
"""


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(COMPAT), "OMP_NUM_THREADS": "1"} | more


def test_the_public_names_are_there_and_nothing_heavy_is() -> None:
    modules = [
        "judge",
        "prompt",
        "responses_converter",
        "rollout_collection",
        "rollout_observability",
        "sandbox",
        "skills",
    ]
    code = f"""
import sys
from nemo_gym import {", ".join(PUBLIC)}
from nemo_gym import {", ".join(modules)}, mcp_auto_exposure
print(*[name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


class Started:
    """One server without a gym around it."""

    def __init__(self, **settings: object) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        inner = {"host": "127.0.0.1", "port": self.port, "entrypoint": "app.py", **settings}
        config = {"mine": {"resources_servers": {"tally": inner}}, "head_server": {"host": "127.0.0.1", "port": 1}}
        self.process = subprocess.Popen(
            [sys.executable, "app.py"],
            cwd=FOLDERS / "resources_servers/tally",
            env=environment(
                NEMO_GYM_CONFIG_DICT=yaml.safe_dump(config),
                NEMO_GYM_CONFIG_PATH="mine",
                PALESTRA_GYM_SOCKET=str(self.listener.fileno()),
                PALESTRA_GYM_SECRET="s",
            ),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[self.listener.fileno()],
        )

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for one in (self.process.stdin, self.process.stderr, self.listener):
            assert one is not None
            one.close()


def test_a_setting_that_its_config_class_ignores_is_told_and_it_ends_with_its_gym() -> None:
    with Started(start=1, strat=2, datasets=[]) as server:
        assert server.process.stderr is not None
        said = server.process.stderr.readline()
        assert b"TallyConfig does not know the setting 'strat'; did you mean start?" in said
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=60) as answer:
            assert answer.read() == b'{"status":"ok"}'
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert server.process.wait(60) == 0


def test_a_config_that_does_not_fit_is_told_and_not_tried_again() -> None:
    with Started(start="a lot") as server:
        _, said = server.process.communicate(timeout=60)
        assert server.process.returncode == 78
        assert b"start" in said
        assert b"valid integer" in said


def test_what_nemo_gym_would_have_brought_is_found_in_what_is_imported(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "palestra.gym.nemo_gym_compat.PROVIDED",
        {"absent_one": "one", "absent_two": "two", "absent_three": "three", "yaml": "pyyaml"},
    )
    root = tmp_path / "resources_servers"
    files = {
        "mine/app.py": "import yaml\nfrom helpers import x\nfrom resources_servers.other.parts import y\n"
        "from nemo_gym.openai_utils import NeMoGymResponse\n",
        "mine/helpers.py": "def x():\n    import absent_one.deep\n",
        "mine/unused.py": "import absent_three",
        "other/parts.py": "from .more import y",
        "other/more.py": "from absent_two import y",
        "other/app.py": "not python",
        "../nemo_gym/openai_utils.py": "import absent_three",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert provided_packages(root / "mine/app.py") == ["one", "two"]
    assert provided_packages(root / "other/app.py") == []


@pytest.mark.slow
def test_a_requirement_of_its_own_is_installed_beside_the_stand_in(tmp_path: Path) -> None:
    package = wheel(tmp_path, "gym_word", "WORD = 'tiny'")
    folder = tmp_path / "resources_servers/wordy"
    folder.mkdir(parents=True)
    (folder / "requirements.txt").write_text(f"-e nemo-gym[dev] @ ../../\n{package}\n")
    (folder / "app.py").write_text(WORDY)
    (tmp_path / "gym.yaml").write_text("wordy: {resources_servers: {wordy: {entrypoint: app.py, domain: other}}}")

    async def nobody(request: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound

    gym = StockGym(tmp_path, nobody, ["gym.yaml"], uv_venv_dir=str(tmp_path / "venvs"))
    try:
        with urllib.request.urlopen(f"{gym.url_of('wordy')}/word", timeout=60) as answer:
            word, prefix = json.loads(answer.read())
    finally:
        gym.close()
    assert word == "tiny"
    assert Path(prefix).is_relative_to(tmp_path / "venvs")


@pytest.mark.slow
def test_several_workers_serve_one_socket_and_are_started_anew_together(tmp_path: Path) -> None:
    workers = {"essay_agent": {"responses_api_agents": {"loud_agent": {"num_workers": 2}}}}
    gym = StockGym(FOLDERS, complete, ["gym.yaml"], **workers)
    try:
        first = psutil.Process(gym.pid_of("essay_agent"))
        workers_left = first.children()
        assert len(workers_left) == 2
        rows = [row_of(f"write {at}") for at in range(30)]

        def response(standing: CollectionStatus) -> None:
            if standing.done >= 5 and len(workers_left) == 2:
                workers_left.pop().kill()

        standing = gym.collected(tmp_path, "essay_agent", rows, response)
        assert (standing.done, standing.failed) == (30, 0)
        second = psutil.Process(gym.pid_of("essay_agent"))
        assert second.pid != first.pid
        left = [second, *second.children()]
    finally:
        gym.close()
    assert psutil.wait_procs(left, timeout=30)[1] == []


def test_heads_and_bodies_are_bounded(gym: StockGym) -> None:
    check_bounds(urlsplit(gym.url_of("tally")).port or 0, health="/")
