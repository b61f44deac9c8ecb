"""Facts about this machine and this installation, gathered without changing anything."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from palestra import __version__
from palestra.config.cores import usable_cores

# Instruction sets that make torch's matrix kernels faster.
CPU_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16", "i8mm")
NOT_FEATURES = {"all", "dev", "ui"}


@dataclass(slots=True)
class Machine:
    python: str
    palestra: str
    platform: str
    cpu: str
    cores: int
    cpu_features: list[str]
    memory_bytes: int
    memory_available_bytes: int
    disk_free_bytes: int
    """Free space of the file system that holds the working directory."""


@dataclass(slots=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: str
    """CUDA's compute capability, e.g. 9.0."""


@dataclass(slots=True)
class Torch:
    version: str
    build: str
    """The build, such as cpu, cuda 13.0 or rocm 6.4."""
    threads: int
    cpu_kernels: str
    """The instruction set torch chose, e.g. AVX512."""
    gpus: list[Gpu] = field(default_factory=list)
    mps: bool = False
    triton: str | None = None
    """Version of Triton, whose kernels a GPU runs in half precision; None: not installed."""
    kernel_cache: str = ""
    """Folder where compiled kernels are kept."""
    can_keep_kernels: bool = False


@dataclass(slots=True)
class Package:
    name: str
    wanted: str
    installed: str | None
    """The installed version; None: not installed."""

    @property
    def is_fine(self) -> bool:
        return self.installed is not None and Requirement(f"{self.name}{self.wanted}").specifier.contains(
            self.installed, prereleases=True
        )


@dataclass(slots=True)
class Extra:
    name: str
    packages: list[Package]

    @property
    def is_complete(self) -> bool:
        return all(package.is_fine for package in self.packages)

    @property
    def install_command(self) -> str:
        return f"pip install 'palestra[{self.name}]'"


def look_at_machine() -> Machine:
    memory = psutil.virtual_memory()
    limit = _memory_limit()
    return Machine(
        python=platform.python_version(),
        palestra=__version__,
        platform=platform.platform(),
        cpu=_cpu_name(),
        cores=usable_cores(),
        cpu_features=_cpu_features(),
        memory_bytes=min(memory.total, limit),
        memory_available_bytes=min(memory.available, limit),
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
    )


def look_at_torch() -> Torch | str | None:
    """Facts about torch; None if it is not installed; the error as a string if importing it fails."""
    try:
        import torch
    except ModuleNotFoundError as error:
        return None if error.name == "torch" else str(error)
    except (ImportError, OSError) as error:
        return str(error)
    if torch.version.hip:
        build = f"rocm {torch.version.hip}"
    else:
        build = f"cuda {torch.version.cuda}" if torch.version.cuda else "cpu"
    gpus = []
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        gpus = [Gpu(d.name, d.total_memory, f"{d.major}.{d.minor}") for d in devices]
    cache = kernel_cache()
    return Torch(
        version=torch.__version__,
        build=build,
        threads=torch.get_num_threads(),
        cpu_kernels=torch.backends.cpu.get_cpu_capability(),
        gpus=gpus,
        mps=torch.backends.mps.is_available(),
        triton=_version("triton"),
        kernel_cache=str(cache),
        can_keep_kernels=_is_writable(cache),
    )


def kernel_cache() -> Path:
    """Folder of compiled kernels, chosen as Triton does."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    return Path(folder) if folder else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def _is_writable(folder: Path) -> bool:
    """Whether the folder is writable, or can be made."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return os.access(there, os.W_OK)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def look_at_extras() -> list[Extra]:
    """The extras as the installed package declares them, so this list cannot fall behind pyproject.toml."""
    distribution = metadata.metadata("palestra")
    requirements = [Requirement(line) for line in distribution.get_all("Requires-Dist") or []]
    names = [name for name in distribution.get_all("Provides-Extra") or [] if name not in NOT_FEATURES]
    return [Extra(name, [_package(r) for r in requirements if _belongs_to(r, name)]) for name in names]


def _belongs_to(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _package(requirement: Requirement) -> Package:
    try:
        installed = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        installed = None
    return Package(requirement.name, str(requirement.specifier), installed)


def _memory_limit() -> int:
    """The memory limit of the container, if there is one: it is lower than the memory of the machine."""
    for file in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            return int(file.read_text())
        except (OSError, ValueError):
            continue
    return sys.maxsize


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip().lower(): value.strip() for key, value in pairs}


def _cpu_name() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def _cpu_features() -> list[str]:
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("features") or "").split())
    return [feature for feature in CPU_FEATURES if feature in flags]
