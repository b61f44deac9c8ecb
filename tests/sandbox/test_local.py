"""The backend local: whom it runs for, and where it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from palestra.sandbox import SandboxError, SandboxLimits, SandboxSpec, SandboxUnavailable, sandbox
from palestra.sandbox.local import bubblewrap, cgroup
from tests.sandbox import attacks
from tests.sandbox.conftest import Box, LoopThread
from tests.sandbox.needs import needs_local

ROOT = Path(__file__).parents[2]
NOBODY = 65534

pytestmark = needs_local


def test_without_bubblewrap_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, loop: LoopThread, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
        loop.run(sandbox("local").start())


def test_without_user_namespaces_it_refuses() -> None:
    program = "from palestra.sandbox import backend; print(backend('local').problem())"
    closed = 'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --reuid 1000 "$@"'
    command = ["unshare", "--user", "--map-user=1000", "--keep-caps", "sh", "-c", closed, "sh"]
    done = subprocess.run([*command, sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if "max_user_namespaces" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"user namespaces cannot be closed here: {done.stderr}")
    assert "bubblewrap cannot make user namespaces here" in done.stdout


def test_half_a_core_needs_a_cgroup(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "place", lambda: None)
    with pytest.raises(SandboxUnavailable, match="whole cores"):
        loop.run(sandbox("local", SandboxSpec(limits=SandboxLimits(cpus=0.5))).start())


def test_an_unknown_backend_is_named_with_the_nearest() -> None:
    with pytest.raises(SandboxError, match="did you mean local"):
        sandbox("loca")


def test_the_owner_is_not_who_runs_inside(box: Box) -> None:
    if box.name != "local":
        pytest.skip("of local only")
    (first,) = (one for one in psutil.process_iter() if _is_ours(one))
    assert first.uids().real == (bubblewrap.unprivileged_user() or os.getuid())
    assert first.uids().real != 0


def _is_ours(process: psutil.Process) -> bool:
    parent = process.parent()
    if parent is None or parent.name() != "bwrap":
        return False
    server = parent.parent()
    return server is not None and server.ppid() == os.getpid()


@pytest.mark.skipif(os.geteuid() != 0, reason="the tests run without root anyway")
@pytest.mark.slow
def test_the_wall_holds_for_an_owner_without_root(tmp_path: Path) -> None:
    """The same attacks, by a Python that everybody may run."""
    python = shutil.which("python3", path="/usr/bin")
    if python is None:
        pytest.skip("there is no /usr/bin/python3")
    paths = ":".join((str(ROOT), *(one for one in sys.path if "site-packages" in one)))
    tests = ["test_attacks.py", "test_limits.py", "test_exec.py", "test_endpoint_proxy.py", "test_left_behind.py"]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(ROOT)]
    done = subprocess.run(
        [*command, "--import-mode=importlib", *(f"{ROOT}/tests/sandbox/{one}" for one in tests)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": "/tmp"},
        cwd=ROOT,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody can read."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_folder_can_be_the_root(walled: str, new_box: Callable[..., Box], open_folder: Path) -> None:
    """With programs of the machine, bound by links, and a file of its own."""
    if walled != "local":
        pytest.skip("containers have images")
    for name in ("bin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (open_folder / name).symlink_to(Path("/", name).readlink())
    (open_folder / "opt").mkdir()
    (open_folder / "opt/mine").write_text("of the image")
    box = new_box(image=str(open_folder), host_folders=("/usr",))
    assert box.sh("cat /opt/mine; ls /; touch /opt/x").text.startswith("of the image")
    assert "etc" not in box.sh("ls /").text.split()


def test_folders_of_the_host_are_read_only(new_box: Callable[..., Box], open_folder: Path) -> None:
    (open_folder / "tool").write_text("a tool")
    box = new_box(host_folders=(str(open_folder),))
    assert box.sh(f"cat {open_folder}/tool; echo x > {open_folder}/y || echo refused").text == "a tool" + "refused\n"
    assert [one.name for one in open_folder.iterdir()] == ["tool"]


def test_a_folder_that_is_not_there_is_named(new_box: Callable[..., Box]) -> None:
    with pytest.raises(SandboxUnavailable, match="/no/such/folder"):
        new_box(host_folders=("/no/such/folder",))


@pytest.mark.parametrize("workdir", ["/home/agent/work", "/tmp/a/b", "/home/agent", "/tmp"])
def test_the_working_folder_may_lie_in_another(walled: str, new_box: Callable[..., Box], workdir: str) -> None:
    if walled == "local":
        box = new_box(workdir=workdir)
        assert box.sh("pwd; touch x ~/y /tmp/z; ls x ~/y /tmp/z").text == f"{workdir}\n/home/agent/y\n/tmp/z\nx\n"


def test_a_spec_shows_no_secrets() -> None:
    spec = SandboxSpec(env={"KEY": "a-secret"}, files={"key": b"a-secret"})
    assert "a-secret" not in repr(spec)


@pytest.mark.parametrize("path", ["work", "/", "/a/../b"])
def test_paths_of_a_spec_are_absolute(path: str) -> None:
    with pytest.raises(ValueError, match="absolute path"):
        SandboxSpec(workdir=path)


@pytest.mark.parametrize("user", [0, 1000])
def test_the_first_process_is_nobodys_inside(
    walled: str, new_box: Callable[..., Box], user: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even root's, if a sandbox should ever have one."""
    if walled != "local":
        pytest.skip("a container's user is another")
    monkeypatch.setattr(bubblewrap, "USER", user)
    box = new_box()
    assert box.sh("id -u").text == f"{user}\n"
    done = box.python(attacks.program("first process"))
    assert (done.text, done.stderr.decode()) == ("held\n", "")
    assert box.sh("echo alive").text == "alive\n"
