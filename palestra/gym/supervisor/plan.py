"""The processes of a gym: one for the shared servers, and one for each of the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from palestra.gym.config import ReservedPorts, to_yaml
from palestra.gym.errors import ServerStartError
from palestra.gym.nemo_gym_compat import COMPAT, provided_packages, stock_path
from palestra.gym.records import GymConfig, Isolation, ServerInstance
from palestra.gym.requirements.folder_requirements import requirements_of
from palestra.gym.start import ProcessStart, to_bytes
from palestra.gym.venvs import interpreter_for, python_version
from palestra.placement.process import ProcessCommand

SHARED = "gym"
"""Name of the process of the shared servers."""
SOCKET_VARIABLE = "PALESTRA_GYM_SOCKET"
"""The descriptor of the listening socket for a server of NeMo Gym's."""
BOUNDED_HTTP_VARIABLE = "PALESTRA_BOUNDED_HTTP"
"""The file with our HTTP protocol, which such a server loads without Palestra."""
BOUNDED_HTTP = Path(__file__).parents[2] / "net" / "bounded_http.py"
LONGEST_VARIABLE = 128 * 1024 - 1  # Linux's limit of one string, including its name


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """A process of a gym that can be started, any number of times."""

    name: str
    servers: list[ServerInstance]
    config: GymConfig
    ports: ReservedPorts

    async def command(self, report: Callable[[str], None]) -> ProcessCommand:
        """Returns the command; may build an environment first. Raises ServerStartError."""
        sockets = {one.name: self.ports.socket_of(one.host, one.port).fileno() for one in self.servers}
        first = self.servers[0]
        if first.is_stock:
            return await self._stock(first, sockets[first.name], report)
        interpreter = sys.executable
        if first.isolation is Isolation.PROCESS and first.folder is not None:
            interpreter = await interpreter_for(first.folder, self.config.settings, report)
        return ProcessCommand(
            arguments=[interpreter, "-m", "palestra.gym.host"],
            environment=os.environ | {"PYTHONUNBUFFERED": "1"},
            folder=None,
            stdin=to_bytes(ProcessStart(config=self.config, sockets=sockets)),
            sockets=list(sockets.values()),
        )

    async def _stock(self, server: ServerInstance, socket: int, report: Callable[[str], None]) -> ProcessCommand:
        assert server.folder is not None
        folder = server.folder.absolute()
        text = to_yaml(self.config.settings)
        if len(text.encode()) > LONGEST_VARIABLE - len("NEMO_GYM_CONFIG_DICT="):
            raise ServerStartError(
                f"{server.name}: the merged config has {len(text.encode())} bytes; servers of NeMo Gym get "
                f"it in an environment variable of at most {LONGEST_VARIABLE} bytes. Start fewer servers in one gym"
            )
        environment = {
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": stock_path(folder),
            "NEMO_GYM_CONFIG_DICT": text,
            "NEMO_GYM_CONFIG_PATH": server.name,
            "PALESTRA_GYM_SECRET": self.config.secret,
            SOCKET_VARIABLE: str(socket),
            BOUNDED_HTTP_VARIABLE: str(BOUNDED_HTTP),
        }
        entrypoint = server.settings["entrypoint"]
        more = provided_packages(folder / entrypoint)
        alone = requirements_of(COMPAT, python_version(self.config.settings))
        interpreter = await interpreter_for(folder, self.config.settings, report, more, alone)
        return ProcessCommand(
            arguments=[interpreter, entrypoint],
            environment=os.environ | environment,
            folder=folder,
            stdin=b"",
            sockets=[socket],
        )


def processes(config: GymConfig, ports: ReservedPorts) -> list[PlannedProcess]:
    shared = [one for one in config.servers.values() if one.isolation is Isolation.SHARED]
    own = [one for one in config.servers.values() if one.isolation is not Isolation.SHARED]
    together = [PlannedProcess(SHARED, shared, config, ports)] if shared else []
    return [*together, *(PlannedProcess(one.name, [one], config, ports) for one in own)]
