"""The base models that a server serves: their workers, by name.

Owns: which worker a name means. Never touches: starting workers, their requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from palestra.server.core.workers.supervisor import WorkerSupervisor


class ServedModels:
    def __init__(self, workers: Mapping[str, WorkerSupervisor]):
        """`workers` has each worker under all names of its base model."""
        self.by_name = workers
        self.workers = list(dict.fromkeys(workers.values()))

    def __iter__(self) -> Iterator[WorkerSupervisor]:
        return iter(self.workers)

    @property
    def names(self) -> list[str]:
        return list(self.by_name)

    def names_of(self, worker: WorkerSupervisor) -> list[str]:
        """Returns the names under which a worker's base model is served."""
        return [name for name, one in self.by_name.items() if one is worker]

    def find(self, name: str) -> WorkerSupervisor | None:
        """Returns the worker of a base model; `name:variant` is served as `name`."""
        return self.by_name.get(name) or self.by_name.get(name.partition(":")[0])
