"""What commands, files and snapshots of a sandbox do, on every backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from palestra.sandbox import SandboxEnded, SandboxError
from palestra.sandbox.spec import MIB
from tests.sandbox.conftest import Box, LoopThread

NewBox = Callable[..., Box]


def test_a_command_has_its_folder_its_environment_and_its_input(new_box: NewBox) -> None:
    box = new_box(env={"KEY": "k", "B": "1"}, files={"in/data.txt": b"hello"})
    done = box.sh('pwd; echo "$KEY$B"; cat in/data.txt -; exit 3', stdin=b" there", env={"B": "2"})
    assert (done.status, done.text) == (3, "/work\nk2\nhello there")
    assert box.sh("pwd", cwd="/tmp").text == "/tmp\n"


def test_further_folders_can_be_written_within_the_limit(new_box: NewBox) -> None:
    box = new_box(writable=("/tests", "/work/deep", "/logs/verifier"))
    box.write("/tests/a", b"1")
    assert box.sh("cat /tests/a; touch /logs/verifier/b deep/c && ls deep").text == "1c\n"
    assert box.sh("touch /other || touch /logs/other || head -c 64M /dev/zero > /tests/a").status == 1


def test_nothing_of_the_owners_environment_comes_in(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_SECRET", "s")
    assert "SECRET" not in box.sh("env; cat /proc/1/environ").text


def test_arguments_are_not_read_by_a_shell(box: Box, loop: LoopThread) -> None:
    assert loop.run(box.inner.exec(["echo", "$HOME; x"])).text == "$HOME; x\n"


def test_the_status_says_how_a_command_ended(box: Box) -> None:
    assert [box.sh(one).status for one in ("exit 0", "exit 255", "kill -9 $$", "no-such-program 2>&-")] == [
        0,
        255,
        137,
        127,
    ]
    assert box.sh("true", cwd="/none").status == 126


def test_files_are_written_and_read_as_they_are(box: Box) -> None:
    data = bytes(range(256)) * 4096
    box.write("/tmp/deep/er/file with spaces", data)
    assert box.read("/tmp/deep/er/file with spaces") == data
    with pytest.raises(SandboxError, match=r"cannot be read.*No such file"):
        box.read("none")
    with pytest.raises(SandboxError, match="cannot be written"):
        box.write("/usr/x", b"")
    box.sh("rm -r /tmp/deep")


def test_a_file_is_read_up_to_a_bound(box: Box, loop: LoopThread) -> None:
    with pytest.raises(SandboxError, match="longer than 10 bytes"):
        loop.run(box.inner.read("/bin/sh", max_bytes=10))
    box.sh("truncate -s 8T /tmp/endless || dd of=/tmp/endless bs=1 seek=8000000000 count=0")
    with pytest.raises(SandboxError, match="longer than 1000 bytes"):
        loop.run(box.inner.read("/tmp/endless", max_bytes=1000))
    box.sh("rm /tmp/endless")


def test_only_files_are_read_and_written(box: Box) -> None:
    """A pipe in the place of a file would let the owner wait for whoever is inside."""
    box.sh("mkdir /tmp/odd; cd /tmp/odd; mkfifo pipe; ln -s pipe link; ln -s /dev/ptmx terminal")
    for path in ("/tmp/odd/pipe", "/tmp/odd/link", "/tmp/odd/terminal", "/tmp/odd", "/dev/zero"):
        with pytest.raises(SandboxError, match=r"cannot be read: .*not a regular file"):
            box.read(path)
        with pytest.raises(SandboxError, match=r"cannot be written: .*not a regular file"):
            box.write(path, b"x")
    box.sh("rm -r /tmp/odd")


def test_a_snapshot_is_where_another_sandbox_begins(new_box: NewBox, loop: LoopThread, tmp_path: Path) -> None:
    box = new_box()
    box.sh("mkdir -p a/b; echo one > a/b/c; ln -s /etc/passwd link; chmod 700 a; printf x > 'odd\n name'")
    loop.run(box.inner.snapshot(tmp_path / "state.tar"))
    box.sh("echo two > a/b/c")
    other = new_box(snapshot=tmp_path / "state.tar")
    assert other.sh("cat a/b/c; readlink link; stat -c %a a; cat odd*").text == "one\n/etc/passwd\n700\nx"
    assert box.sh("cat a/b/c").text == "two\n"


def test_output_is_kept_to_its_limit_and_the_command_goes_on(box: Box) -> None:
    done = box.sh("yes | head -c 3000000; yes no | head -c 3000000 >&2; echo $? > /tmp/status", max_output=1000)
    assert (done.stdout, done.stderr, done.is_truncated) == (b"y\n" * 500, (b"no\n" * 334)[:1000], True)
    assert box.read("/tmp/status") == b"0\n"


def test_a_command_that_takes_too_long_is_killed_with_what_it_started(box: Box) -> None:
    done = box.sh("trap '' TERM; echo begun; sleep 1000 & sleep 1001 | sleep 1002", limit_s=0.5)
    assert (done.is_late, done.status, done.text) == (True, 124, "begun\n")
    assert box.sh("ps -eo args 2>/dev/null | grep -c 'sleep 100[0-2]$'").text == "0\n"


def test_a_command_ends_although_others_hold_its_output(new_box: NewBox) -> None:
    box = new_box()
    assert box.sh("sleep 1000 & echo done", limit_s=20).text == "done\n"
    assert box.sh("ps -eo args | grep -c 'sleep 1000$'").text == "1\n"  # it goes on in the background


def test_commands_run_side_by_side(box: Box, loop: LoopThread) -> None:
    async def both() -> list[str]:
        reader = box.inner.exec("mkfifo /tmp/f; cat /tmp/f; rm /tmp/f")
        writer = box.inner.exec("while [ ! -p /tmp/f ]; do sleep 0.05; done; echo through > /tmp/f")
        return [done.text for done in await asyncio.gather(reader, writer)]

    assert loop.run(both()) == ["through\n", ""]


def test_a_cancelled_command_is_gone(new_box: NewBox, loop: LoopThread) -> None:
    box = new_box()

    async def cancelled() -> None:
        running = asyncio.ensure_future(box.inner.exec("touch /tmp/begun; sleep 1000"))
        while (await box.inner.exec("test -e /tmp/begun")).status:
            pass
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    loop.run(cancelled())
    assert box.sh("ps -eo args | grep -c 'sleep 1000$'").text == "0\n"


def test_a_long_input_that_nobody_reads_does_not_block(box: Box) -> None:
    assert box.sh("echo done", stdin=b"x" * 4 * MIB).text == "done\n"
    assert box.sh("wc -c", stdin=b"x" * 4 * MIB).text.strip() == str(4 * MIB)


def test_a_stopped_sandbox_says_so(new_box: NewBox) -> None:
    box = new_box()
    box.stop()
    box.stop()
    with pytest.raises(SandboxEnded, match="stopped"):
        box.sh("true")


def test_output_is_handed_on_as_it_comes(new_box: NewBox, loop: LoopThread) -> None:
    """The command ends only when its first words have arrived."""
    box = new_box()
    parts: list[tuple[int, bytes]] = []

    async def on_output(number: int, data: bytes) -> None:
        parts.append((number, data))
        if data == b"first\n":
            await box.inner.write("/tmp/heard", b"")

    command = "echo first; until [ -e /tmp/heard ]; do sleep 0.05; done; echo second >&2; exit 3"
    done = loop.run(box.inner.exec(command, on_output=on_output))
    assert (done.status, done.stdout, done.stderr) == (3, b"", b"")
    assert parts == [(1, b"first\n"), (2, b"second\n")]


def test_what_is_handed_on_has_a_bound_and_waits_for_a_slow_reader(box: Box, loop: LoopThread) -> None:
    parts: list[bytes] = []

    async def slowly(_: int, data: bytes) -> None:
        await asyncio.sleep(0.5)
        parts.append(data)

    done = loop.run(box.inner.exec("yes | head -c 3000000", max_output=1000, on_output=slowly))
    assert (done.status, done.is_truncated, b"".join(parts)) == (0, True, b"y\n" * 500)


def test_an_error_of_the_reader_is_raised(box: Box, loop: LoopThread) -> None:
    async def broken(_: int, data: bytes) -> None:
        raise BrokenPipeError("nobody reads")

    with pytest.raises(BrokenPipeError, match="nobody reads"):
        loop.run(box.inner.exec("echo one; echo two", on_output=broken))
    assert box.sh("echo alive").text == "alive\n"
