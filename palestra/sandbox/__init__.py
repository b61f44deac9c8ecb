"""Sandboxes: where agents and other people's programs run behind a wall. `sandbox(name, spec)` makes one.

Only pipes are handed into a sandbox: a file can be opened again through `/proc/self/fd` and changed. Without a cgroup,
a sandbox refuses whatever holds memory that no process is charged for.
"""

from palestra.sandbox.errors import SandboxEnded, SandboxError, SandboxUnavailable
from palestra.sandbox.protocol import Sandbox
from palestra.sandbox.registry import backend, backend_names, sandbox
from palestra.sandbox.spec import EndpointProxy, ExecResult, OutputSink, SandboxLimits, SandboxSpec
from palestra.util.renamed import renamed

__all__ = [
    "EndpointProxy",
    "ExecResult",
    "OutputSink",
    "Sandbox",
    "SandboxEnded",
    "SandboxError",
    "SandboxLimits",
    "SandboxSpec",
    "SandboxUnavailable",
    "backend",
    "backend_names",
    "sandbox",
]

__getattr__ = renamed(__name__, ModelDoor="EndpointProxy")
