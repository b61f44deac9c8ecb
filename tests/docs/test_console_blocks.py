"""Every command that README and docs show works as it is written, or says why it is not run here."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.docs.blocks import SHELLS, Block, blocks_of, pages
from tests.docs.shell import Shell

BLOCKS = [block for page in pages() for block in blocks_of(page)]
PORTS = (8000, 8030, 10086, 11000)


class Pages:
    """One shell at a time: that of the page whose blocks are run."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._page, self._shell = "", None

    def shell(self, page: str) -> Shell:
        if page != self._page or self._shell is None:
            self.close()
            _check_ports()
            name = page.replace("/", "-").removesuffix(".md")
            self._page, self._shell = page, Shell(self._folders.mktemp(name) / "scratch")
        return self._shell

    def close(self) -> None:
        shell, self._shell = self._shell, None
        if shell is not None:
            shell.close()


@pytest.fixture(scope="module")
def open_pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    found = Pages(tmp_path_factory)
    yield found
    found.close()


@pytest.mark.docs
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.id)
def test_commands_work_as_written(open_pages: Pages, block: Block) -> None:
    if reason := block.comments.get("not run"):
        pytest.skip(f"{block.id} is not run: {reason}")
    shell = open_pages.shell(block.page)
    if "file" in block.comments:
        (shell.folder / block.comments["file"]).write_text(block.text, encoding="utf-8")
    printed = [shell.run(command, block.comments) for command in block.commands] if block.language in SHELLS else []
    shell.settle()
    assert block.comments.get("prints", "") in "".join(printed)


def test_every_block_of_a_shell_has_commands() -> None:
    assert [block.id for block in BLOCKS if block.language in SHELLS and not block.commands] == []


def _check_ports() -> None:
    """Commands are run as written, on the ports that they name."""
    for port in PORTS:
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                pytest.fail(f"port {port} is in use; these tests need it")
