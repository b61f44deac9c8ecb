"""What programs in a sandbox try, and do not get."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from palestra.sandbox import SandboxError, seccomp
from tests.sandbox import attacks
from tests.sandbox.conftest import Box, LoopThread
from tests.sandbox.outside import SECRET, Outside


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    """In a folder that everybody could read who sees it."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        found = Outside(Path(folder))
        yield found
        found.close()


@pytest.mark.parametrize("attack", [one for one in attacks.ATTACKS if one != "entering"])
def test_the_wall_holds(box: Box, outside: Outside, attack: str) -> None:
    done = box.python(attacks.program(attack, **outside.values()))
    assert (done.text, done.stderr.decode()) == ("held\n", "")


@pytest.mark.skipif(seccomp.compute_only() is None, reason="there is no filter for this machine")
@pytest.mark.parametrize("attack", [one for one in attacks.ATTACKS if one != "entering"])
def test_the_jail_of_programs_that_only_compute_holds(outside: Outside, attack: str) -> None:
    """The same attacks where the program grader and verifiers run what models wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sandbox.computing"],
        input=attacks.program(attack, **outside.values()),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("held\n", "")


def test_nobody_sees_the_helpers_on_their_way_in(box: Box, loop: LoopThread) -> None:
    async def enter_meanwhile() -> tuple[str, str]:
        program = ["/usr/bin/python3", "-I", "-S", "-c", attacks.program("entering")]
        watching = asyncio.ensure_future(box.inner.exec(program))
        while not watching.done():
            await box.inner.exec("true")
        done = await watching
        return done.text, done.stderr.decode()

    assert loop.run(enter_meanwhile()) == ("held\n", "")


def test_one_sandbox_does_not_see_another(box: Box, new_box: Callable[..., Box]) -> None:
    other = new_box()
    other.sh("echo mine > /tmp/mine; sleep 1000 & true")
    assert box.sh("cat /tmp/mine; ps -eo args | grep '[s]leep 1000'; true").text == ""


def test_a_link_does_not_lead_the_owner_out(box: Box, outside: Outside) -> None:
    box.sh(f"ln -sf {outside.secret_file} /tmp/link")
    with pytest.raises(SandboxError, match="cannot be read"):
        box.read("/tmp/link")
    with pytest.raises(SandboxError, match="cannot be written"):
        box.write("/tmp/link", b"changed")
    assert outside.secret_file.read_text() == SECRET


def test_the_attacks_on_the_network_would_work_without_a_wall(outside: Outside) -> None:
    """The attack itself is sound: on this side of the wall it gets what it wants."""
    program = attacks.program("network", **outside.values())
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert "GOT TCP to 127.0.0.1" in done.stdout
    assert "GOT an abstract Unix socket" in done.stdout
    assert "GOT a Unix socket" in done.stdout
