"""A folder that imports more of NeMo Gym than the stand-in has is refused before anything starts, with the names."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from palestra.cli import main
from palestra.gym.config import GymSources, load_gym
from palestra.gym.errors import GymConfigError
from palestra.gym.nemo_gym_compat import COMPAT, compat_names, missing_names
from tests.gym.stock.conftest import FOLDERS

APP = """
from typing import TYPE_CHECKING

from nemo_gym import SimpleResourcesServer, sandbox
from nemo_gym.openai_utils import NeMoGymResponse, NoSuchResponse
from resources_servers.other.parts import part

try:
    from nemo_gym.cluster import Cluster
except ImportError:
    Cluster = None

if TYPE_CHECKING:
    from nemo_gym.hints import Hint


def later():
    from nemo_gym import nowhere
"""
GYM = "odd: {resources_servers: {odd: {entrypoint: app.py, domain: other}}}"


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """The root of a folder that uses names which no NeMo Gym has."""
    files = {
        "gym.yaml": GYM,
        "resources_servers/odd/app.py": APP,
        "resources_servers/other/parts.py": "import nemo_gym.sandbox.balloons as part",
        "resources_servers/odd/unused.py": "from nemo_gym import unused",
        "nemo_gym/__init__.py": "from nemo_gym.inner import what_a_checkout_has",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_the_stand_in_lacks_is_named_with_its_place(odd: Path) -> None:
    with pytest.raises(GymConfigError) as response:
        load_gym(GymSources(files=["gym.yaml"], roots=[odd]))
    first, *lines = str(response.value).splitlines()
    assert first == f"{odd / 'resources_servers/odd'} imports names that our stand-in for NeMo Gym does not have:"
    assert [line.strip() for line in lines] == [
        "nemo_gym.nowhere (resources_servers/odd/app.py:18)",
        "nemo_gym.openai_utils.NoSuchResponse (resources_servers/odd/app.py:5)",
        "nemo_gym.sandbox.balloons (resources_servers/other/parts.py:1)",
    ]


def test_the_command_ends_before_anything_starts(odd: Path) -> None:
    result = CliRunner().invoke(main, ["gym", "run", "--search-dir", str(odd), "-c", "gym.yaml", "head_server.port=0"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nemo_gym.sandbox.balloons" in result.stderr
    assert "The head is at" not in result.stderr


def test_a_folder_of_which_we_have_our_own_is_pointed_at_it(tmp_path: Path) -> None:
    folder = tmp_path / "responses_api_agents/simple_agent"
    folder.mkdir(parents=True)
    (folder / "app.py").write_text("from nemo_gym import balloons")
    (tmp_path / "gym.yaml").write_text("a: {responses_api_agents: {simple_agent: {entrypoint: app.py}}}")
    with pytest.raises(GymConfigError, match=r"remove simple_agent from gym\.use_stock"):
        load_gym(GymSources(files=["gym.yaml"], roots=[tmp_path], overrides=["gym.use_stock=[simple_agent]"]))


@pytest.mark.parametrize("entrypoint", sorted(FOLDERS.glob("*/*/app.py")), ids=lambda path: path.parent.name)
def test_a_folder_that_uses_what_is_there_lacks_nothing(entrypoint: Path) -> None:
    assert missing_names(entrypoint) == []


def test_names_that_are_imported_on_demand_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(COMPAT))
    import nemo_gym

    found = compat_names("nemo_gym")
    assert found is not None
    assert {*nemo_gym.__all__, "judge", "sandbox"} <= found
    assert all(hasattr(nemo_gym, name) for name in nemo_gym.__all__)
    assert compat_names("nemo_gym.balloons") is None
