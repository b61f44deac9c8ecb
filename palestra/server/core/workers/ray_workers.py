"""Workers of a server on the nodes of a Ray cluster.

Owns: joining the cluster, the network of links, the settings of a worker there. Never touches: starting workers.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import structlog

from palestra import __version__
from palestra.config.serve import ModelConfig, RayConfig, ServeConfig
from palestra.placement.ray_cluster import ClusterNode, cluster_nodes, connect, disconnect, own_address
from palestra.server.core.workers.files import WorkerFiles
from palestra.server.core.workers.link_security import LinkNetwork
from palestra.server.core.workers.ray_host import RayHost
from palestra.server.core.workers.supervisor import RemoteWorker, WorkerError, known_facts
from palestra.types.engine import WorkerConfig
from palestra.util.hugging_face import hub_id_of
from palestra.util.model_fingerprint import model_fingerprint

log = structlog.get_logger()

AUTO, FIRST_GPU = "auto", "cuda:0"


class RayWorkers:
    def __init__(
        self, config: ServeConfig, ray: RayConfig, secret: str, network: LinkNetwork, nodes: list[ClusterNode]
    ):
        self._config, self._ray, self._network = config, ray, network
        self._server_id = hashlib.sha256(secret.encode()).hexdigest()[:12]
        self._has_gpus = any(node.total.get("GPU") for node in nodes)

    @classmethod
    async def open(cls, config: ServeConfig, ray: RayConfig, secret: str, stack: AsyncExitStack) -> RayWorkers:
        """Joins the cluster until the stack is closed. Raises WorkerError."""
        try:
            if await connect(ray.address):
                stack.push_async_callback(disconnect)
        except ConnectionError as e:
            raise WorkerError(str(e)) from None
        nodes = await cluster_nodes()
        network = LinkNetwork(ray.host or own_address(), secret)
        stack.push_async_callback(asyncio.to_thread, network.close)
        log.info("joined a Ray cluster", address=ray.address, nodes=[node.summary for node in nodes])
        return cls(config, ray, secret, network, nodes)

    def place(self, config: WorkerConfig, model: ModelConfig) -> tuple[WorkerConfig, RemoteWorker]:
        folder = Path(config.state)
        name = "-".join((self._server_id, *folder.relative_to(self._config.state).parts))
        is_on_gpu = config.device.startswith("cuda") or (config.device == AUTO and self._has_gpus)
        device, ranks = FIRST_GPU if is_on_gpu else "cpu", max(1, len(config.devices))  # each rank sees its own GPU
        if life := (known_facts(folder) or {}).get("life"):
            self._network.admit(name, life)  # before it can ask: who is refused once does not come back
        security = self._network.security(name)
        config = msgspec.structs.replace(
            config,
            address=self._network.address(folder),
            server_key=security.public_key,
            is_remote=True,
            version=__version__,
            node_folder=self._ray.node_folder,
            base=str(Path(model.path).resolve()),
            fingerprint=model_fingerprint(model.path),
            hub_id=hub_id_of(model.path),
            device=device,
            devices=(device,) * len(config.devices),
        )
        needs: Mapping[str, float] = {
            "CPU": float(config.threads or 1),
            **({"GPU": 1.0} if is_on_gpu else {}),
            **self._ray.resources,
        }
        host = RayHost(name, self._ray, self._network, [needs] * ranks)
        files = WorkerFiles(folder, model.path, self._config.checkpoint_folder)
        return config, RemoteWorker(host, security, files)
