"""A package comes from where the folder says, or not at all."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from palestra.gym.errors import GymConfigError, ServerStartError
from palestra.gym.requirements.folder_requirements import has_requirements, requirements_of
from palestra.gym.venvs import interpreter_for
from tests.gym.test_venvs import wheel
from tests.sandbox.needs import needs_local

VERSION = "3.13.14"
BACKEND = """
import os, zipfile
from pathlib import Path

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name, version = {name!r}, {version!r}
    wheel, about = f"{{name}}-{{version}}-py3-none-any.whl", f"{{name}}-{{version}}.dist-info"
    with zipfile.ZipFile(os.path.join(folder, wheel), "w") as out:
        out.writestr(f"{{name}}.py", Path("code.py").read_text())
        out.writestr(f"{{about}}/METADATA", f"Metadata-Version: 2.1\\nName: {{name}}\\nVersion: {{version}}\\n")
        out.writestr(f"{{about}}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        out.writestr(f"{{about}}/RECORD", "")
    return wheel
"""
OWN_BACKEND = '[build-system]\nrequires = []\nbuild-backend = "own_backend"\nbackend-path = ["."]\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "resources_servers" / "mine"
    made.mkdir(parents=True)
    return made


def write_project(folder: Path, dependencies: str, rest: str) -> None:
    (folder / "pyproject.toml").write_text(f'[project]\nname = "mine"\ndependencies = [{dependencies}]\n{rest}\n')


@pytest.mark.parametrize(
    ("requirement", "source", "expected"),
    [
        ("tiny", "{git = 'https://h/tiny.git'}", "tiny @ git+https://h/tiny.git"),
        ("tiny>=1", "{git = 'https://h/t', rev = 'abc123'}", "tiny @ git+https://h/t@abc123"),
        ("tiny", "{git = 'ssh://git@h/t', tag = 'v1'}", "tiny @ git+ssh://git@h/t@refs/tags/v1"),
        ("tiny", "{git = 'https://h/t', branch = 'main'}", "tiny @ git+https://h/t@refs/heads/main"),
        ("tiny", "{git = 'https://h/t', rev = 'a', subdirectory = 'b'}", "tiny @ git+https://h/t@a#subdirectory=b"),
        ("Tiny_Thing[a, b]", "{git = 'https://h/t'}", "Tiny_Thing[a,b] @ git+https://h/t"),
        ("tiny[a]", "{git = 'file:///t', rev = 'a'}", "git+file:///t@a#egg=tiny[a]"),
        ("tiny", "{url = 'https://h/t.whl#sha256=12'}", "tiny @ https://h/t.whl#sha256=12"),
        ("tiny", "{url = 'https://h/t.zip#sha256=12', subdirectory = 'b'}", "tiny @ https://h/t.zip#sha256=12&subdirectory=b"),
        ("tiny", "[{git = 'https://h/t', marker = 'python_version < \"3\"'}, {url = 'https://h/t.whl'}]", "tiny @ https://h/t.whl"),
        ("tiny>1", "{git = 'https://h/t', marker = 'python_version < \"3\"'}", "tiny>1"),
        ("tiny>1", "{git = 'https://h/t', extra = 'never'}", "tiny>1"),
        ("tiny; python_version < '3'", "{git = 'https://h/t'}", None),
    ],
)  # fmt: skip
def test_sources_become_direct_references_with_their_pins(
    folder: Path, requirement: str, source: str, expected: str | None
) -> None:
    name = "tiny-thing" if "Thing" in requirement else "tiny"
    write_project(folder, f'"nemo-gym[dev]", "{requirement}"', f"[tool.uv.sources]\n{name} = {source}")
    assert requirements_of(folder, VERSION) == ([] if expected is None else [expected])
    assert has_requirements(folder)


def test_commits_and_hashes_of_a_lock_count_where_it_fits(folder: Path) -> None:
    commit, digest = "c" * 40, "d" * 64
    sources = "tiny = {git = 'https://h/t', tag = 'v1'}\nsmall = {url = 'https://h/s.whl'}\nold = {git = 'https://h/o'}"
    write_project(folder, '"tiny", "small", "old"', f"[tool.uv.sources]\n{sources}")
    packages = [
        f"name = 'tiny'\nsource = {{git = 'https://h/t?tag=v1#{commit}'}}",
        f"name = 'small'\nsource = {{url = 'https://h/s.whl'}}\nwheels = [{{url = 'x', hash = 'sha256:{digest}'}}]",
        f"name = 'old'\nsource = {{git = 'https://elsewhere/o#{commit}'}}",
    ]
    (folder / "uv.lock").write_text("".join(f"[[package]]\n{one}\n" for one in packages))
    assert requirements_of(folder, VERSION) == [
        f"tiny @ git+https://h/t@{commit}",
        f"small @ https://h/s.whl#sha256={digest}",
        "old @ git+https://h/o",
    ]


def test_sources_on_this_machine(folder: Path) -> None:
    (folder / "lib").mkdir()
    package = wheel(folder, "gym_tiny", "")
    sources = f"lib = {{path = 'lib', editable = true}}\ngym-tiny = {{path = '{package.name}'}}"
    write_project(folder, '"lib[x]", "gym-tiny"', f"[tool.uv.sources]\n{sources}\nnemo-gym = {{path = '../..'}}")
    assert requirements_of(folder, VERSION) == [f"-e {folder}/lib[x]", f"gym-tiny @ file://{package}"]


@pytest.mark.parametrize(
    "rest",
    [
        "[tool.uv.sources]\ntiny = {workspace = true}",
        "[tool.uv.sources]\ntiny = {index = 'own'}\n[[tool.uv.index]]\nname = 'own'\nurl = 'https://h'",
        "[tool.uv.sources]\ntiny = {path = '../not-there'}",
        "[tool.uv.sources]\ntiny = {git = 'git@h:tiny.git'}",
        "[tool.uv.sources]\ntiny = {git = 'https://h/t', tag = 'a', rev = 'b'}",
        "[tool.uv.sources]\ntiny = {git = 'https://h/t', lfs = true}",
        "[tool.uv.sources]\ntiny = {url = 'https://h/t --index-url=https://stranger'}",
        "[tool.uv.sources]\ntiny = {svn = 'https://h/t'}",
        "[tool.uv.sources]\ntiny = 'https://h/t'",
        "[tool.uv.sources]\ntiny = {git = 'https://h/t', marker = 'nonsense'}",
        "[tool.uv]\noverride-dependencies = ['tiny>2']\n[tool.uv.sources]\ntiny = {git = 'https://h/t'}",
    ],
)
def test_a_source_that_cannot_be_handed_on_is_refused_by_name(folder: Path, rest: str) -> None:
    write_project(folder, '"tiny"', rest)
    with pytest.raises(GymConfigError, match=r"(?s)tiny has .*taken from nowhere else.*skip_venv_if_present"):
        requirements_of(folder, VERSION)


@pytest.mark.parametrize("place", ["", "../.."])
def test_indexes_of_a_project_need_uv(
    folder: Path, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of pip's own settings may have another package of that name."""
    (folder / place / "uv.toml").write_text("[[index]]\nname = 'own'\nurl = 'https://h'\n")
    (folder / "requirements.txt").write_text("tiny\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerStartError, match=r"tool\.uv\.index: only uv follows this; to install it: pip install uv"):
        asyncio.run(interpreter_for(folder, {"uv_venv_dir": str(tmp_path / "venvs")}, print))


def test_requirements_in_the_file_that_a_project_names(folder: Path) -> None:
    table = "[tool.setuptools.dynamic]\ndependencies = {file = ['requirements.txt']}\n"
    sources = "[tool.uv.sources]\ntiny = {git = 'https://h/t', rev = 'a'}\n"
    (folder / "pyproject.toml").write_text(f"[project]\nname = 'mine'\ndynamic = ['dependencies']\n{table}{sources}")
    (folder / "requirements.txt").write_text("nemo-gym[dev]\ntiny # small\nother>=2\n")
    assert requirements_of(folder, VERSION) == ["tiny @ git+https://h/t@a", "other>=2"]


def git(repository: Path, *arguments: str) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    subprocess.run(["git", "-C", str(repository), *settings, *arguments], check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gym_tiny", "iniconfig"])
def test_a_pinned_package_is_installed_although_a_stranger_has_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A tag and a branch have one name here: the tag is what the folder says. Our own environment, which the server
    sees, has an iniconfig of the same version."""
    version = "1.0" if name == "gym_tiny" else metadata.version(name)
    (index := tmp_path / "index").mkdir()
    wheel(index, name, "WORD = 'stranger'")
    (repository := tmp_path / "tiny").mkdir()
    git(repository, "init", "-q", "-b", "main")
    (repository / "pyproject.toml").write_text(f"{OWN_BACKEND}[project]\nname = {name!r}\nversion = {version!r}\n")
    (repository / "own_backend.py").write_text(BACKEND.format(name=name, version=version))
    for word in ("pinned", "newer"):
        (repository / "code.py").write_text(f"WORD = {word!r}")
        git(repository, "add", ".")
        git(repository, "commit", "-q", "-m", word)
        if word == "pinned":
            git(repository, "tag", "-a", "-m", "first", "v1")
    git(repository, "branch", "v1")
    write_project(folder, f'"{name}"', f"[tool.uv.sources]\n{name} = {{git = '{repository.as_uri()}', tag = 'v1'}}")
    for program in ("PIP", "UV"):
        monkeypatch.setenv(f"{program}_NO_INDEX", "1")
        monkeypatch.setenv(f"{program}_FIND_LINKS", str(index))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    interpreter = asyncio.run(interpreter_for(folder, {"uv_venv_dir": str(tmp_path / "venvs")}, print))
    code = f"import {name}; print({name}.WORD)"
    assert subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True).stdout == "pinned\n"


COMPUTED = """
import os
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    print("noise")
    Path("left-here").touch()
    try:
        Path({place!r}).write_text("was here")
        line = "gym-tiny"
    except OSError:
        line = "nemo-gym[dev]"
    Path(folder, "mine.dist-info").mkdir()
    Path(folder, "mine.dist-info/METADATA").write_text(f"Name: mine\\nRequires-Dist: {{line}}\\n")
    return "mine.dist-info"
"""


def write_computed(folder: Path, place: Path) -> None:
    (folder / "own_backend.py").write_text(COMPUTED.format(place=str(place)))
    (folder / "pyproject.toml").write_text(f"[project]\nname = 'mine'\ndynamic = ['dependencies']\n{OWN_BACKEND}")


@needs_local
def test_a_project_that_computes_its_requirements_is_asked_in_a_sandbox(folder: Path, tmp_path: Path) -> None:
    write_computed(folder, tmp_path / "outside")
    assert has_requirements(folder)
    assert asyncio.run(interpreter_for(folder, {}, print)) == sys.executable  # nothing but NeMo Gym
    assert not (tmp_path / "outside").exists()
    assert not (folder / "left-here").exists()


def test_set_up_code_runs_as_the_user_when_that_is_allowed(folder: Path, tmp_path: Path) -> None:
    write_computed(folder, tmp_path / "outside")
    sources = "[tool.uv.sources]\ngym-tiny = {workspace = true}\n"
    (folder / "pyproject.toml").write_text((folder / "pyproject.toml").read_text() + sources)
    with pytest.raises(GymConfigError, match="gym-tiny has the source"):
        asyncio.run(interpreter_for(folder, {"gym": {"allow_setup": ["mine"]}}, print))
    assert (tmp_path / "outside").read_text() == "was here"
    assert not (folder / "left-here").exists()


@needs_local
def test_set_up_code_that_fails_is_told_with_the_flag(folder: Path, tmp_path: Path) -> None:
    write_computed(folder, tmp_path)
    (folder / "own_backend.py").write_text("raise OSError('no compiler for you')")
    with pytest.raises(ServerStartError, match=r"(?s)no compiler for you.*gym\.allow_setup=\[mine\]"):
        asyncio.run(interpreter_for(folder, {}, print))
