"""Environments of servers: built when something is required, once, by one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from palestra.gym.errors import GymConfigError, ServerStartError
from palestra.gym.requirements.folder_requirements import has_requirements, requirements_of
from palestra.gym.venvs import MARK, interpreter_for

VERSION = "3.13.14"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "resources_servers" / "mine"
    made.mkdir(parents=True)
    return made


@pytest.mark.parametrize(
    "text",
    [
        "-e nemo-gym[dev] @ ../../\n",
        "nemo-gym==0.5.1\n\n# nothing else\n",
        "../..\n",
        "-e ../../[dev]  # itself\n",
        "nemo_gym[dev,sandbox]\n",
        "",
    ],
)
def test_nemo_gym_itself_is_no_requirement(folder: Path, text: str) -> None:
    (folder / "requirements.txt").write_text(text)
    assert not has_requirements(folder)
    assert asyncio.run(interpreter_for(folder, {}, print)) == sys.executable


def test_requirements_as_pip_reads_them(folder: Path) -> None:
    lines = [
        "-e nemo-gym[dev] @ ../../",
        "numpy>=2 # for sums",
        "nemo-gym-extras==1",
        "-r more.txt",
        "x @ git+http://h/#a",
    ]
    (folder / "requirements.txt").write_text("\n".join(lines))
    assert requirements_of(folder, VERSION) == [
        "numpy>=2",
        "nemo-gym-extras==1",
        f"-r {folder}/more.txt",
        "x @ git+http://h/#a",
    ]


def test_requirements_of_a_project(folder: Path) -> None:
    (folder / "pyproject.toml").write_text('[project]\nname = "mine"\ndependencies = ["nemo-gym", "scipy"]')
    assert requirements_of(folder, VERSION) == ["scipy"]
    (folder / "requirements.txt").write_text("")
    with pytest.raises(GymConfigError, match="keep one"):
        requirements_of(folder, VERSION)


def test_an_environment_that_is_there_can_be_taken_as_it_is(folder: Path, tmp_path: Path) -> None:
    (folder / "requirements.txt").write_text("not-a-package-anywhere")
    elsewhere = tmp_path / "venvs/resources_servers/mine/.venv/bin"
    elsewhere.mkdir(parents=True)
    (elsewhere / "python").touch()
    settings = {"skip_venv_if_present": True, "uv_venv_dir": str(tmp_path / "venvs")}
    assert asyncio.run(interpreter_for(folder, settings, print)) == str(elsewhere / "python")


def wheel(folder: Path, name: str, code: str) -> Path:
    """A package by hand: nothing is downloaded, nothing is built."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    facts = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr(f"{name}.py", code)
        out.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        out.writestr(
            f"{facts}/WHEEL", "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        out.writestr(f"{facts}/RECORD", "")
    return path


@pytest.mark.slow
def test_an_environment_is_built_once_and_what_is_half_built_again(folder: Path, tmp_path: Path) -> None:
    expected = wheel(tmp_path, "gym_tiny", "WORD = 'tiny'")
    (folder / "requirements.txt").write_text(f"-e nemo-gym[dev] @ ../../\n{expected}\n")
    response: list[str] = []
    settings = {"uv_venv_dir": str(tmp_path / "venvs")}

    async def twice() -> list[str]:
        return await asyncio.gather(*(interpreter_for(folder, settings, response.append) for _ in range(2)))

    first, second = asyncio.run(twice())
    assert first == second
    assert len(response) == 1
    code = "import gym_tiny, palestra.gym, sys; print(gym_tiny.WORD, sys.prefix)"
    said = subprocess.run([first, "-c", code], capture_output=True, text=True, check=True).stdout
    venv = Path(first).parents[1]
    assert said.split() == ["tiny", str(venv)]

    (venv / MARK).unlink()
    (venv / "rest").touch()
    assert asyncio.run(interpreter_for(folder, settings, response.append)) == first
    assert len(response) == 2
    assert not (venv / "rest").exists()


@pytest.mark.slow
def test_what_cannot_be_installed_is_told(folder: Path, tmp_path: Path) -> None:
    (folder / "requirements.txt").write_text("./not-there.whl\n")
    with pytest.raises(ServerStartError, match=r"(?s)its requirements cannot be installed.*not-there"):
        asyncio.run(interpreter_for(folder, {"uv_venv_dir": str(tmp_path / "venvs")}, print))
    assert not list(tmp_path.glob(f"venvs/*/*/*/{MARK}"))
